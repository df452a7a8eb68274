"""The rule of buffers, whatever ranks the micro-batches are on: that of one process that runs them in order."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoal_workers.engine.step.buffer_rule import Buffer, Norm, find_buffers, folds_statistics

NUM_MICRO_BATCHES = 5


def _samples(number: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(number))


def _found(model: nn.Module) -> tuple[list[Buffer], list[Norm]]:
    return find_buffers([("", model)], lambda _, name, one: Buffer(name, one), lambda *_: True, folds_statistics)


def _added_up(model: nn.Module, bounds: list[int], num_calls: Callable[[int], int]) -> dict[str, Tensor]:
    """The buffers after an update: rank r has the micro-batches from bounds[r] on."""
    ranks = [_found(copy.deepcopy(model)) for _ in bounds]
    lasts = [*bounds[1:], NUM_MICRO_BATCHES]
    for (buffers, norms), first, last in zip(ranks, bounds, lasts, strict=True):
        for number in range(first, last):
            (root, *_) = [module for module, _ in buffers[0].attach_points]
            values = [buffer.original.clone() for buffer in buffers]
            for buffer, value in zip(buffers, values, strict=True):
                buffer.install(value)
            for _ in range(num_calls(number)):
                root(_samples(number))
            calls = {id(norm): norm.count_calls() for norm in norms}
            for buffer in buffers:
                assert buffer.current is not None
                buffer.add(buffer.current, 1 / NUM_MICRO_BATCHES, calls.get(id(buffer.norm)))
            for buffer in buffers:
                buffer.install(buffer.original)
    per_rank = [sum(map(num_calls, range(first, last))) for first, last in zip(bounds, lasts, strict=True)]
    after = {}
    for number, buffer in enumerate(ranks[0][0]):
        shares = [buffers[number].compute_share(sum(per_rank[rank + 1 :])) for rank, (buffers, _) in enumerate(ranks)]
        after[buffer.name] = buffer.compute_value(torch.stack(shares).sum(0), sum(per_rank))
    return after


@pytest.mark.parametrize("bounds", [[0], [0, 3], [0, 1, 4]])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_are_those_of_one_process_however_often_a_norm_is_called(
    momentum: float | None, bounds: list[int]
) -> None:
    def num_calls(number: int) -> int:
        return number % 3  # none, one or two

    model = nn.BatchNorm1d(3, momentum=momentum)
    model(_samples(99))
    plain = copy.deepcopy(model)
    for number in range(NUM_MICRO_BATCHES):
        for _ in range(num_calls(number)):
            plain(_samples(number))
    after = _added_up(model, bounds, num_calls)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(after[name], value, msg=name)


def test_other_buffers_get_the_weighted_sum_counters_the_sum_and_flags_any_change() -> None:
    original = {
        "mean": torch.tensor([1.0, 2.0]),
        "phase": torch.tensor([1 + 1j]),
        "count": torch.tensor(7),
        "flags": torch.tensor([True, False, False]),
    }
    changed = {
        "mean": [torch.tensor([3.0, 2.0]), torch.tensor([1.0, 6.0])],
        "phase": [torch.tensor([3 + 1j]), torch.tensor([1 - 3j])],
        "count": [torch.tensor(9), torch.tensor(8)],
        "flags": [torch.tensor([False, False, False]), torch.tensor([True, True, False])],
    }
    expected = {
        "mean": torch.tensor([2.0, 4.0]),
        "phase": torch.tensor([2 - 1j]),
        "count": torch.tensor(10),
        "flags": torch.tensor([False, True, False]),
    }
    for name, before in original.items():
        shares = []
        for value in changed[name]:
            buffer = Buffer(name, before)
            buffer.add(value, 0.5, None)
            shares.append(buffer.compute_share())
        assert torch.equal(Buffer(name, before).compute_value(torch.stack(shares).sum(0)), expected[name]), name
