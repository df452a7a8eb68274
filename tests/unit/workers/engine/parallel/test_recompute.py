"""Recomputation changes only memory: no bit of a gradient, no name and no count."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal_workers.contract.layout import Recompute
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.engine.parallel.recompute import apply_compile, apply_recompute, is_recomputing

PLAN = ParallelPlan(blocks="inner.blocks", num_blocks=3)


class Block(nn.Module):
    """Attention, a wide feed-forward layer, dropout; counts the tokens that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 48)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *, gain: float) -> Tensor:
        if not is_recomputing():
            self.seen += x.shape[0] * x.shape[1]
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + gain * self.down(F.dropout(F.gelu(self.up(self.norm(x)).float().square()).tanh(), 0.2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(3))})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner["blocks"]:
            x = block(x, gain=0.5)
        return x.square().mean()


def build(mode: Recompute) -> Net:
    torch.manual_seed(3)
    model = Net()
    apply_recompute(model, PLAN, mode)
    return model


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(4)
    model(x).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were created in the block and are still referenced."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.held += num_bytes
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.held -= num_bytes


def bytes_between_the_passes(mode: Recompute) -> int:
    model, x = build(mode), torch.randn(4, 32, 16)
    with LiveBytes() as live:
        loss = model(x)
        held = live.held
    del loss
    return held


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Sizes of what autograd saves inside, as far as it is not left to a checkpoint to bring back."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.itemsize)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


@pytest.mark.parametrize("mode", [Recompute.SELECTIVE, Recompute.FULL])
def test_gradients_have_the_same_bits(mode: Recompute) -> None:
    x = torch.randn(4, 32, 16, requires_grad=True)
    expected = gradients(build(Recompute.NONE), x)
    found = gradients(build(mode), x)
    assert len(found) == len(expected) == 24
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_more_recomputation_keeps_less_memory_between_the_passes() -> None:
    held = {mode: bytes_between_the_passes(mode) for mode in Recompute}
    assert held[Recompute.FULL] < 0.2 * held[Recompute.NONE]
    assert held[Recompute.FULL] < 0.6 * held[Recompute.SELECTIVE] < 0.5 * held[Recompute.NONE]


def test_full_saves_the_inputs_of_the_blocks_only() -> None:
    model, x = build(Recompute.FULL), torch.randn(4, 32, 16, requires_grad=True)
    with saved_bytes() as sizes:
        model(x)
    num_inputs = 3 + 1  # of the blocks, and of the loss
    assert sum(sizes) <= (num_inputs + 1) * x.numel() * x.itemsize


@pytest.mark.parametrize("mode", list(Recompute))
def test_names_and_modules_stay(mode: Recompute) -> None:
    plain, model = Net(), build(mode)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]


@pytest.mark.parametrize("mode", list(Recompute))
def test_a_recomputed_block_counts_once(mode: Recompute) -> None:
    model = build(mode)
    gradients(model, torch.randn(4, 32, 16))
    assert [block.seen.item() for block in model.inner["blocks"]] == [4 * 32] * 3


@pytest.mark.parametrize("mode", list(Recompute))
def test_without_gradients_no_activation_is_saved(mode: Recompute) -> None:
    with torch.no_grad():
        assert not build(mode)(torch.randn(4, 32, 16)).requires_grad


@pytest.mark.slow
@pytest.mark.cells(1)
@pytest.mark.parametrize("mode", list(Recompute))
def test_compiled_blocks_compute_the_same_count_once_and_share_one_compilation(mode: Recompute) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 32, 16, requires_grad=True)  # as what comes from the block before
    expected = gradients(build(Recompute.NONE), x)
    model = build(mode)
    names = list(model.state_dict())
    num_compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    apply_compile(model, PLAN, backend="aot_eager")
    found = gradients(model, x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - num_compiled == 1
    assert list(model.state_dict()) == names
    assert [block.seen.item() for block in model.inner["blocks"]] == [4 * 32] * 3
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("mode", list(Recompute))
def test_a_backward_pass_in_two_parts_as_zero_bubble_schedules_run_it_is_right(mode: Recompute) -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))

    torch.manual_seed(6)
    plain = nn.Sequential(block(), block())
    model = copy.deepcopy(plain)
    apply_recompute(nn.ModuleDict({"inner": nn.ModuleDict({"blocks": model})}), PLAN, mode)
    x, upstream = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    desired = torch.autograd.grad(plain(x), [x, *plain.parameters()], upstream)
    inputs, groups = stage_backward_input([model(x)], [upstream], [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    found = [inputs[0], *(parameter.grad for parameter in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(desired, found, strict=True))


@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(blocks="inner.layers")])
def test_a_plan_without_blocks_is_refused(plan: ParallelPlan) -> None:
    with pytest.raises(ValueError, match=r"plan\.blocks"):
        apply_recompute(Net(), plan, Recompute.FULL)
    with pytest.raises(ValueError, match=r"plan\.blocks"):
        apply_compile(Net(), plan)
