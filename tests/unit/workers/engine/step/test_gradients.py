"""Parameters that no rank has used have no gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal_workers.contract.layout import fully_sharded
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.gradients import UseCounts
from shoal_workers.engine.step.update import Update


@given(st.integers(1, 70), st.integers(0, 90), st.data())
def test_what_no_rank_has_used_is_found_in_the_sum(world_size: int, num_names: int, data: st.DataObject) -> None:
    names = [f"layer.{number}" for number in range(num_names)]
    each = [data.draw(st.sets(st.sampled_from(names))) if names else set() for _ in range(min(world_size, 3))]
    counts = UseCounts(names, world_size)
    sums = sum(counts.encoded(used) for used in each).tolist()
    assert counts.unused(sums) == [name for name in names if not any(name in used for used in each)]


@pytest.mark.parametrize("world_size", [1, 3, 1024, 16384])
def test_a_count_of_all_ranks_does_not_reach_its_neighbour(world_size: int) -> None:
    names = [f"layer.{number}" for number in range(9)]
    counts = UseCounts(names, world_size)
    sums = (counts.encoded(names[::2]) * world_size).tolist()
    assert counts.unused(sums) == names[1::2]


def test_a_parameter_that_the_optimizer_lacks_keeps_no_gradient() -> None:
    model = nn.Linear(2, 2)
    update = Update(Assembly(fully_sharded(1), (model,)), torch.optim.SGD([model.weight], lr=0.1), ())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        assert model.bias.grad is not None and torch.equal(model.bias.grad, torch.ones(2)), "it would add up"
        update.step(1.0)
        assert model.weight.grad is None and model.bias.grad is None
