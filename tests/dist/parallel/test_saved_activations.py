"""The activations that autograd saves in a block, counted tensor by tensor, match the planner's prediction."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoal_service.planner.memory import saved_bytes
from shoal_service.planner.shape import shape_of_language_model
from shoal_workers.contract.language_model import LanguageModelConfig, plan_of_language_model
from shoal_workers.contract.layout import Recompute
from shoal_workers.engine.parallel.recompute import apply_recompute
from shoal_workers.tasks.transformer import Transformer

SAMPLES, TOKENS = 2, 128
EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "expert_hidden_dim": 128, "num_shared_experts": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", [{}, {"num_kv_heads": 2}, EXPERTS], ids=["dense", "grouped", "experts"])
@pytest.mark.parametrize("mode", list(Recompute))
def test_the_saved_activations_of_a_block_match_the_prediction(
    model: dict[str, Any], dtype: torch.dtype, mode: Recompute
) -> None:
    config = LanguageModelConfig(dim=256, num_heads=8, num_layers=2, seq_len=TOKENS, vocab_size=512, **model)
    shape = shape_of_language_model(config, 512)
    block = shape.moe if config.num_experts else shape.dense
    kept = {Recompute.NONE: block.saved, Recompute.SELECTIVE: block.saved_selective, Recompute.FULL: block.saved_full}
    predicted = SAMPLES * TOKENS * float(saved_bytes(kept[mode], np.array([1]), dtype.itemsize)[0])
    assert _kept(config, dtype, mode) == pytest.approx(predicted, rel=0.05)


def _kept(config: LanguageModelConfig, dtype: torch.dtype, mode: Recompute) -> int:
    """Bytes that are alive after a block's forward pass because of it, its input included."""
    torch.manual_seed(0)
    model = Transformer(config, 512).to(dtype)
    apply_recompute(model, plan_of_language_model(config), mode)
    x = torch.randn(SAMPLES, TOKENS, config.dim, dtype=dtype, requires_grad=True) * 1
    return _bytes_saved(model, x)


def _bytes_saved(model: Transformer, x: Tensor) -> int:
    rotations = model.rotations[:, : x.shape[1]]
    known = {tensor.untyped_storage().data_ptr() for tensor in _live_tensors()} - {x.untyped_storage().data_ptr()}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model.blocks[1](x, rotations)
    known.add(result.untyped_storage().data_ptr())
    for tensor in _live_tensors():  # selective recomputation stores its tensors outside of autograd
        pack(tensor)
    return sum(size for place, size in sizes.items() if place not in known)


def _live_tensors() -> list[Tensor]:
    """Those with memory; others have other types. isinstance would touch deprecated proxies, which warn."""
    return [thing for thing in gc.get_objects() if type(thing) in (Tensor, Parameter) and thing.device.type == "cpu"]
