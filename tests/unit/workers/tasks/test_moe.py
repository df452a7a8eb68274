"""The mixture computes what a loop over tokens does, with its gradients, at any capacity and in any dtype."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.language_model import LanguageModelConfig
from shoal_workers.tasks.feed_forward import Experts, MixtureOfExperts, multiply_groups
from shoal_workers.tasks.transformer import Transformer


def _config(**changes: Any) -> LanguageModelConfig:
    small = {"dim": 16, "num_layers": 2, "num_heads": 2, "seq_len": 8, "num_experts": 4, "expert_hidden_dim": 8}
    return LanguageModelConfig.model_validate({**small, **changes})


def _mixture(**changes: Any) -> MixtureOfExperts:
    """One with weights, and biases of about the spread of the scores."""
    torch.manual_seed(0)
    moe = MixtureOfExperts(_config(**changes))
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.5)
    if moe.router.balance == "bias":
        moe.router.expert_bias.normal_(std=0.2)
    return moe


def _token_by_token(moe: MixtureOfExperts, x: Tensor) -> Tensor:
    router, experts = moe.router, moe.experts
    busy, rows = Counter[int](), []
    tokens = x.flatten(0, -2)
    capacity = math.inf
    if router.capacity_factor is not None:
        capacity = math.ceil(router.capacity_factor * len(tokens) * router.top_k / len(experts.gate))
    for token in tokens:
        logits = router.weight @ token
        is_bias = router.balance == "bias"
        scores = logits.sigmoid() if is_bias else logits.softmax(0)
        preferred = scores + router.expert_bias if is_bias else scores
        chosen = preferred.argsort(descending=True)[: router.top_k].tolist()
        total = scores[chosen].sum() if router.top_k > 1 else 1.0
        row = torch.zeros_like(token) if moe.shared is None else moe.shared(token)
        for expert in chosen:
            busy[expert] += 1
            if busy[expert] <= capacity:
                hidden = F.silu(token @ experts.gate[expert]) * (token @ experts.up[expert])
                row = row + scores[expert] / total * (hidden @ experts.down[expert])
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("balance", ["bias", "none"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 1},
        {"top_k": 4},
        {"num_shared_experts": 2},
        {"num_experts": 7, "top_k": 3, "expert_hidden_dim": 5},
        {"capacity_factor": 0.5},
        {"capacity_factor": 1.0, "num_shared_experts": 1},
        {"capacity_factor": 100.0},
    ],
)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(changes: dict[str, Any], balance: str) -> None:
    moe = _mixture(**changes, balance=balance)
    x = torch.randn(3, 8, 16, requires_grad=True)
    into = torch.randn(3, 8, 16)
    inputs = [x, *moe.parameters()]
    found, expected = moe(x), _token_by_token(moe, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(
        torch.autograd.grad(found, inputs, into), torch.autograd.grad(expected, inputs, into), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capacity_factor", [None, 0.7])
def test_the_gradients_are_right_in_fp64(capacity_factor: float | None) -> None:
    moe = _mixture(dim=4, expert_hidden_dim=3, num_shared_experts=1, capacity_factor=capacity_factor).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in moe.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(moe, dict(zip(names, parameters, strict=True)), (x,))
        return out

    assert torch.autograd.gradcheck(run, (x, *moe.parameters()))


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 0], [0, 4, 0, 0]])
@pytest.mark.parametrize("width", [8, 5, 0])
def test_a_grouped_product_is_one_product_for_each_group_even_without_rows(counts: list[int], width: int) -> None:
    """Width 8 has a kernel, the others have none."""
    rows = torch.randn(sum(counts), 4, requires_grad=True)
    weights = torch.randn(4, 4, width, requires_grad=True)
    found = multiply_groups(rows, weights, torch.tensor(counts))
    into = torch.randn_like(found)
    expected = torch.cat([part @ weight for part, weight in zip(rows.split(counts), weights, strict=True)])
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, (rows, weights), into),
        torch.autograd.grad(expected, (rows, weights), into),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_parts_of_each_experts_width_add_up_to_the_expert() -> None:
    """What `hidden_dims` promises to tensor parallelism; parts may be uneven."""
    experts = _mixture(expert_hidden_dim=7).experts
    tokens, counts = torch.randn(10, 16), torch.tensor([3, 0, 5, 2])
    parts = []
    for first, last in ((0, 4), (4, 7)):
        part = Experts(4, 16, last - first)
        for name, dim in Experts.hidden_dims.items():
            setattr(part, name, nn.Parameter(getattr(experts, name).narrow(dim, first, last - first)))
        parts.append(part(tokens, counts))
    torch.testing.assert_close(parts[0] + parts[1], experts(tokens, counts))


def test_with_bf16_experts_are_chosen_by_fp32_scores() -> None:
    moe = _mixture(balance="none").bfloat16()
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    choices = moe.router(x)
    assert choices.weights.dtype == torch.float32
    assert torch.equal(choices.experts, (x.float() @ moe.router.weight.float().T).softmax(-1).topk(2).indices)
    assert moe(x).dtype == torch.bfloat16


def test_results_have_the_same_bits_in_every_run() -> None:
    moe = _mixture(num_shared_experts=1)
    x = torch.randn(3, 8, 16)

    def run() -> list[Tensor]:
        return [moe(x), *torch.autograd.grad(moe(x).square().sum(), list(moe.parameters()))]

    assert all(torch.equal(one, other) for one, other in zip(run(), run(), strict=True))


def test_the_first_blocks_may_stay_dense_and_names_are_a_contract() -> None:
    torch.manual_seed(0)
    model = Transformer(_config(num_dense_layers=1, num_shared_experts=2), 40)
    assert {name for name, _ in model.blocks[0].feed_forward.named_parameters()} == {
        "gate.weight",
        "up.weight",
        "down.weight",
    }
    sparse = model.blocks[1].feed_forward.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in sparse.items()} == {
        "router.weight": (4, 16),
        "router.expert_bias": (4,),
        "experts.gate": (4, 16, 8),
        "experts.up": (4, 16, 8),
        "experts.down": (4, 8, 16),
        "shared.gate.weight": (16, 16),
        "shared.up.weight": (16, 16),
        "shared.down.weight": (16, 16),
    }
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_number_of_parameters_is_the_sum_of_its_parts() -> None:
    model = Transformer(_config(num_shared_experts=1), 40)
    attention, norms = 4 * 16 * 16, 2 * 16
    mixture = 4 * 16 + (4 + 1) * 3 * 16 * 8
    assert sum(p.numel() for p in model.parameters()) == 40 * 16 + 2 * (attention + norms + mixture) + 16


def test_an_expert_is_as_wide_as_a_dense_layer_by_default() -> None:
    assert MixtureOfExperts(_config(expert_hidden_dim=None)).experts.gate.shape == (4, 16, 64)
    assert MixtureOfExperts(_config(expert_hidden_dim=None, hidden_dim=24)).experts.gate.shape == (4, 16, 24)


def test_weights_are_drawn_from_the_global_generator_with_the_spread_of_linear_layers() -> None:
    torch.manual_seed(0)
    one = Transformer(_config(dim=64, num_heads=4, expert_hidden_dim=64), 40)
    torch.manual_seed(0)
    same = Transformer(_config(dim=64, num_heads=4, expert_hidden_dim=64), 40)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), same.state_dict().values(), strict=True))
    experts = one.blocks[0].feed_forward.experts
    linear = one.blocks[0].attention.query.weight.std().item()
    assert experts.gate.std().item() == pytest.approx(linear, rel=0.1)
    assert experts.down.std().item() == pytest.approx(linear / 2, rel=0.1)  # two layers: 4 writers
