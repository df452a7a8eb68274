"""Load is counted once per real micro-batch, biases follow it, and the balance loss has the gradient it should have."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal_workers.contract.language_model import LanguageModelConfig
from shoal_workers.tasks.feed_forward import (
    Router,
    TokenCounts,
    compute_balance_loss,
    count_choices,
    forget_load,
    move_biases,
    set_share_of_step,
    sum_load,
)
from shoal_workers.tasks.transformer import Transformer


def _config(**changes: Any) -> LanguageModelConfig:
    small = {"dim": 16, "num_layers": 2, "num_heads": 2, "seq_len": 8, "num_experts": 4, "expert_hidden_dim": 8}
    return LanguageModelConfig.model_validate({**small, **changes})


def _router(**changes: Any) -> Router:
    torch.manual_seed(0)
    router = Router(_config(**changes))
    torch.nn.init.normal_(router.weight)
    return router


def _crowded(**changes: Any) -> tuple[Router, Tensor]:
    """A router, and tokens nearly all of which want expert 0: they have a positive mean."""
    router = _router(num_experts=8, **changes)
    with torch.no_grad():
        router.weight.mul_(0.25)
        router.weight[0] += 0.5
    return router, torch.randn(256, 16) + 0.5


def _back(router: Router, x: Tensor) -> Tensor:
    """The choices of each expert, after forward and backward."""
    choices = router(x)
    choices.weights.square().sum().backward()
    return count_choices(choices.experts, len(router.weight))


def test_the_loads_of_all_micro_batches_of_a_step_are_summed() -> None:
    router = _router()
    expected = _back(router, torch.randn(5, 16)) + _back(router, torch.randn(9, 16))
    assert torch.equal(router.expert_load, expected)
    assert router.expert_load.sum() == 14 * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_activations_count_once(use_reentrant: bool) -> None:
    model = Transformer(_config(), 40)
    plain, recomputed = [], []
    tokens = torch.randint(40, (3, 8))
    for loads, is_recomputing in ((plain, False), (recomputed, True)):
        x = model.embedding(tokens)
        for block in model.blocks:
            rotations = model.rotations[:, :8]
            x = checkpoint(block, x, rotations, use_reentrant=use_reentrant) if is_recomputing else block(x, rotations)
        x.square().sum().backward()
        loads += [block.feed_forward.router.expert_load.clone() for block in model.blocks]
        forget_load(model)
    assert all(load.sum() == 3 * 8 * 2 for load in plain)
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))


def test_passes_without_gradients_and_padding_passes_are_not_counted() -> None:
    router = _router()
    with torch.no_grad():
        router(torch.randn(5, 16))
    set_share_of_step(router, 0.0)
    _back(router, torch.randn(5, 16))
    assert not router.expert_load.any()
    set_share_of_step(router, 0.25)
    assert _back(router, torch.randn(5, 16)).sum() == router.expert_load.sum() == 10


def test_a_bias_moves_by_its_rate_towards_the_mean_of_all_ranks() -> None:
    router = _router(balance_rate=0.5)
    router.expert_load.copy_(torch.tensor([3, 1, 2, 0]))
    sum_load(router, lambda load: load.add_(torch.tensor([1, 1, 0, 4])))  # in all 4, 2, 2, 4: 3 on average
    move_biases(router)
    assert router.expert_bias.tolist() == [-0.5, 0.5, 0.5, -0.5]
    assert not router.expert_load.any()
    router.expert_load.copy_(torch.tensor([2, 2, 2, 2]))
    move_biases(router)
    assert router.expert_bias.tolist() == [-0.5, 0.5, 0.5, -0.5]


def test_a_fractional_mean_is_compared_exactly() -> None:
    router = _router(num_experts=3, top_k=1, balance_rate=1.0)
    router.expert_load.copy_(torch.tensor([2**53 + 1, 2**53, 2**53]))
    move_biases(router)
    assert router.expert_bias.tolist() == [-1, 1, 1]


def test_all_layers_are_summed_in_one_collective_and_without_layers_there_is_none() -> None:
    calls: list[int] = []
    model = Transformer(_config(num_layers=3, num_dense_layers=1), 40)
    sum_load(model, lambda load: calls.append(load.numel()))
    sum_load(Transformer(_config(num_experts=0), 40), lambda load: calls.append(load.numel()))
    sum_load(Transformer(_config(balance="loss"), 40), lambda load: calls.append(load.numel()))
    assert calls == [2 * 4]


def test_biases_equalise_the_load_over_the_steps() -> None:
    router, x = _crowded(balance_rate=0.02)
    spreads = []
    for _ in range(60):
        load = _back(router, x).double()
        spreads.append((load.max() / load.mean()).item())
        move_biases(router)
    assert spreads[0] > 3
    assert spreads[-1] < 1.3


def test_the_bias_is_state_and_the_load_is_not() -> None:
    assert set(_router().state_dict()) == {"weight", "expert_bias"}
    assert set(_router(balance="loss").state_dict()) == {"weight"}


def test_positions_at_an_expert_are_in_order_of_sample_and_token() -> None:
    chosen = torch.tensor([[[0, 1], [1, 2]], [[1, 0], [3, 1]]])
    load, turns = TokenCounts(5)(chosen)
    assert load.tolist() == [2, 4, 1, 1, 0]
    assert turns.tolist() == [[[0, 0], [1, 0]], [[2, 1], [0, 3]]]


def test_an_even_load_has_a_balance_loss_of_one_and_everything_at_one_expert_of_their_number() -> None:
    scores = torch.full((6, 4), 0.25)
    assert compute_balance_loss(scores, torch.tensor([3, 3, 3, 3]), 2).item() == pytest.approx(1.0)
    scores = torch.tensor([[1.0, 0, 0, 0]]).expand(6, 4)
    assert compute_balance_loss(scores, torch.tensor([6, 0, 0, 0]), 1).item() == pytest.approx(4.0)


def test_the_parts_of_a_balance_loss_add_up_if_each_rank_has_the_global_load() -> None:
    """As under context parallelism."""
    scores, load = torch.rand(6, 4).softmax(-1), torch.tensor([2, 4, 5, 1])
    parts = [compute_balance_loss(scores[:2], load, 2), compute_balance_loss(scores[2:], load, 2)]
    assert sum(parts).item() == pytest.approx(compute_balance_loss(scores, load, 2).item())  # type: ignore[union-attr]


@pytest.mark.parametrize(("share", "num_copies"), [(1.0, 1), (0.25, 1), (0.25, 2), (0.0, 1)])
def test_the_balance_loss_is_weighted_by_the_micro_batchs_share_and_changes_no_output(
    share: float, num_copies: int
) -> None:
    router, silent = _router(balance="loss", balance_rate=0.3), _router(balance="none")
    router.num_copies = num_copies
    x, into = torch.randn(7, 16), torch.randn(7, 2)
    set_share_of_step(router, share)
    chosen, weights, _ = router(x)
    plain, load = silent(x).weights, count_choices(chosen, 4)
    assert torch.equal(weights, plain)
    (found,) = torch.autograd.grad(weights, router.weight, into)
    scores = (x @ silent.weight.T).softmax(-1)
    loss = (plain * into).sum() + share / num_copies * 0.3 * compute_balance_loss(scores, load, 2)
    (expected,) = torch.autograd.grad(loss, silent.weight)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_a_compiled_router_has_the_same_gradient_and_counts_the_same(balance: str) -> None:
    plain, compiled = _router(balance=balance, balance_rate=0.3), _router(balance=balance, balance_rate=0.3)
    run = torch.compile(compiled.forward, backend="aot_eager")
    x, into = torch.randn(7, 16), torch.randn(7, 2)
    for router, forward in ((plain, plain.forward), (compiled, run)):
        set_share_of_step(router, 0.5)
        forward(x).weights.backward(into)
    assert plain.weight.grad is not None
    torch.testing.assert_close(compiled.weight.grad, plain.weight.grad)
    if balance == "bias":
        assert torch.equal(compiled.expert_load, plain.expert_load)


def test_a_balance_loss_equalises_the_load() -> None:
    router, x = _crowded(balance="loss", balance_rate=1.0)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.3)
    spreads = []
    for _ in range(60):
        choices = router(x)
        (choices.weights.sum() * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        load = count_choices(choices.experts, 8).double()
        spreads.append((load.max() / load.mean()).item())
    assert spreads[0] > 3
    assert spreads[-1] < 1.1
