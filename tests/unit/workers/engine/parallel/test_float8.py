"""Linear layers in fp8 compute what torchao's own layers do; which layers stay, and which devices are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.spec import Fp8Scales
from shoal_workers.engine.parallel.float8 import apply_float8, multiply, why_no_fp8

float8 = pytest.importorskip("torchao.float8")
PLAN = ParallelPlan(blocks="blocks", num_blocks=1)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 20), nn.Linear(20, 16))])
        self.head = nn.Linear(16, 32)


def _layer_and_input() -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(32, 48, dtype=torch.bfloat16), torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("scales", list(Fp8Scales))
def test_a_layer_has_the_result_and_the_gradients_of_torchaos_layer(scales: Fp8Scales) -> None:
    layer, x = _layer_and_input()
    config = replace(float8.Float8LinearConfig.from_recipe_name(str(scales)), emulate=True)
    other = float8.convert_to_float8_training(nn.Sequential(layer), config=config)[0]
    expected = other(x)
    gradients = torch.autograd.grad(expected.sum(), (x, other.weight, other.bias))
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(layer)])
    apply_float8(model, PLAN, scales, "cpu")
    result = layer(x)
    assert torch.equal(result, expected)
    found = torch.autograd.grad(result.sum(), (x, layer.weight, layer.bias))
    assert all(torch.equal(*pair) for pair in zip(found, gradients, strict=True))
    assert not torch.equal(result, nn.functional.linear(x, layer.weight, layer.bias))


def test_only_layers_of_blocks_whose_sides_are_multiples_of_16_change() -> None:
    model = _Model().to(torch.bfloat16)
    first, second, third = model.blocks[0]  # type: ignore[misc]
    apply_float8(model, PLAN, Fp8Scales.TENSORWISE, "cpu")
    for layer, changes in ((first, True), (second, False), (third, False), (model.head, False)):
        x = torch.randn(16, layer.in_features, dtype=torch.bfloat16)
        whole = nn.functional.linear(x, layer.weight, layer.bias)
        assert torch.equal(layer(x), whole) is not changes
    assert list(model.state_dict()) == list(_Model().state_dict())


def test_a_layer_that_computes_in_fp32_stays() -> None:
    model = _Model()
    apply_float8(model, PLAN, Fp8Scales.TENSORWISE, "cpu")
    layer, x = model.blocks[0][0], torch.randn(16, 32)  # type: ignore[index]
    assert torch.equal(multiply(layer, x, layer.weight, layer.bias), nn.functional.linear(x, layer.weight, layer.bias))


def test_gpus_without_fp8_are_named() -> None:
    assert why_no_fp8("NVIDIA H100", (9, 0)) == why_no_fp8("NVIDIA L40S", (8, 9)) == ""
    assert "NVIDIA A100 has compute capability 8.0" in why_no_fp8("NVIDIA A100", (8, 0))
