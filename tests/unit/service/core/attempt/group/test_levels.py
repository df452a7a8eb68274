"""Shard levels that the planner cannot tell apart are tried in the group that trains, and the fastest one stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.hangs import MEDIAN_OF
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.layout import ShardLevel

NewWorld = Callable[..., Any]
OPTIMIZER, GRADIENTS, FULL = ShardLevel.OPTIMIZER, ShardLevel.GRADIENTS, ShardLevel.FULL
AS_LONG = {OPTIMIZER: 0.5, GRADIENTS: 0.5, FULL: 0.5}
ONE_EACH = {"global_size": 3, "micro_size": 1}
"""Samples: with more micro-batches for a rank, level full is predicted to be too slow to be tried."""


def long_run(new_world: NewWorld, step_s: dict[ShardLevel, float]) -> Any:
    """A group of three whose levels are predicted to be equally fast, after its first steps."""
    world = new_world(workers=3, memory=True, stop={"steps": 5000}, batch=ONE_EACH)
    world.total_steps, world.step_s = 5000, step_s
    world.open(then=MEDIAN_OF + 2)
    assert world.state.stage is Stage.RUNNING and world.state.group.layout.shard is OPTIMIZER
    return world


def train(world: Any, seconds: float = 0.0) -> list[ShardLevel]:
    """Lets time pass, and trains until no other level is to be tried: the levels of the groups."""
    world.pass_time(seconds)
    levels = [world.state.group.layout.shard]
    left = MEDIAN_OF + 2
    while left:
        world.run(1)
        left -= 1
        if world.state.stage is Stage.FORMING:
            world.join()
            levels.append(world.state.group.layout.shard)
            left = MEDIAN_OF + 2
    return levels


def test_a_group_that_has_trained_long_enough_tries_every_level_and_keeps_the_fastest(new_world: NewWorld) -> None:
    world = long_run(new_world, {OPTIMIZER: 0.5, GRADIENTS: 0.4, FULL: 0.6})
    assert train(world, seconds=4) == [OPTIMIZER], "it is not due yet"
    tried = train(world, seconds=6)
    assert set(tried) == set(AS_LONG) and tried[0] is OPTIMIZER and tried[-1] is GRADIENTS
    [measured] = world.events("layout.measured")
    assert measured == {"shard": GRADIENTS, "step_s": {OPTIMIZER: 0.5, GRADIENTS: 0.4, FULL: 0.6}}
    assert world.state.history.steps_lost == 0 and world.incidents() == []
    assert train(world, seconds=20) == [GRADIENTS], "it is known now"


def test_the_planned_level_comes_back_if_no_other_is_clearly_faster(new_world: NewWorld) -> None:
    world = long_run(new_world, {OPTIMIZER: 0.5, GRADIENTS: 0.49, FULL: 0.51})
    tried = train(world, seconds=10)
    assert set(tried) == set(AS_LONG) and tried[-1] is OPTIMIZER and len(tried) == 4


def test_the_fastest_level_is_used_again_by_the_next_group_of_that_size(new_world: NewWorld) -> None:
    world = long_run(new_world, AS_LONG | {GRADIENTS: 0.3})
    train(world, seconds=10)
    world.lose(1)
    assert world.world_size == 2 and world.state.group.layout.shard is OPTIMIZER, "nothing is known of two workers"
    world.run(2)
    world.start_all()
    world.run(2)
    world.recover()
    assert world.world_size == 3 and world.state.group.layout.shard is GRADIENTS


def test_a_level_that_loses_its_group_is_not_tried_again(new_world: NewWorld) -> None:
    world = long_run(new_world, AS_LONG | {GRADIENTS: 0.1, FULL: 0.1})
    world.pass_time(10)
    world.run(1)
    world.join()
    lost = world.state.group.layout.shard
    assert lost is not OPTIMIZER
    world.run(2)
    world.lose(0, IncidentCause.WORKER_DIED)
    world.run(2)
    world.start_all()
    world.run(2)
    world.recover()
    assert world.world_size == 3 and world.state.group.layout.shard is OPTIMIZER
    tried = train(world, seconds=10)
    assert lost not in tried and tried[-1] is not OPTIMIZER


@pytest.mark.parametrize("spec", [{"parallelism": {"dp_shard": 3}}, {"deterministic": True}, {"stop": {"steps": 600}}])
def test_nothing_is_tried_where_it_cannot_pay_or_was_not_asked_for(new_world: NewWorld, spec: dict[str, Any]) -> None:
    steps = spec.get("stop", {"steps": 5000})["steps"]
    world = new_world(workers=3, memory=True, **{"stop": {"steps": steps}, "batch": ONE_EACH, **spec})
    world.total_steps = steps
    world.open(then=MEDIAN_OF + 2)
    assert len(train(world, seconds=20)) == 1 and world.state.stage is Stage.RUNNING
