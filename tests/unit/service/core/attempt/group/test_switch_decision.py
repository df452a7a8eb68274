"""A running group plans another layout only if there is something to plan for, and once for each change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kit.worlds.attempt.parts import directed, from_journal
from shoal_service.core.attempt import machine, switching
from shoal_service.core.attempt.messages import Event, Tick
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.parts import PlanInputs, Running, Stage
from shoal_service.core.hardware_profile import HardwareProfile, Racks
from shoal_service.core.layout_plan import Plan
from shoal_service.planner import plan
from shoal_workers.contract.layout import ParallelismSpec
from shoal_workers.contract.spec import JobSpec

NewWorld = Callable[..., Any]
TWO_MICRO_BATCHES = {"batch": {"global_size": 2, "micro_size": 1}, "deterministic": True}
"""A third rank would have nothing to compute, so it idles."""


class CountingPlanner:
    """The real planner, and the world sizes of its calls."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, spec: JobSpec, world_size: int, profile: HardwareProfile | None, racks: Racks = (), /) -> Plan:
        self.asked.append(world_size)
        return plan(spec, world_size, profile, racks)


def after(state: Attempt, planner: CountingPlanner, *events: Event, now: float) -> Attempt:
    for number, event in enumerate(events):
        state, _ = machine.step(state, event, now + 0.1 * number, planner)
    return state


@pytest.mark.parametrize("standby", [0, 1])
def test_the_planner_is_not_called_again_without_a_change(new_world: NewWorld, standby: int) -> None:
    world = new_world(workers=2, standby=standby).open(then=3)
    planner = CountingPlanner()
    state = after(world.state, planner, *[Tick()] * 10, now=world.now)
    assert planner.asked == [] and state.stage is Stage.RUNNING


def test_an_idle_worker_is_planned_for_once(new_world: NewWorld) -> None:
    world = new_world(workers=3, **TWO_MICRO_BATCHES).open()
    world.start_all()
    world.form()
    planner = CountingPlanner()
    [channel] = [name for name in world.pending if name.startswith("reports")]
    formed = world.pending.pop(channel)
    state = after(world.state, planner, *formed, *[Tick()] * 10, now=world.now)
    assert state.stage is Stage.RUNNING and len(state.group.workers) == 2
    assert planner.asked == [3], "three workers are usable, two ranks train"
    assert from_journal(state) == state


def test_a_change_of_parallelism_is_planned_for_once(new_world: NewWorld) -> None:
    world = new_world(workers=2, **TWO_MICRO_BATCHES).open(then=3)
    planner = CountingPlanner()
    changed = directed(world.state.target, parallelism=ParallelismSpec(dp_shard=2))
    state = after(world.state, planner, changed, *[Tick()] * 10, now=world.now)
    assert state.stage is Stage.RUNNING, "the layout is the same"
    assert planner.asked == [2]


def test_the_group_keeps_its_layout_until_the_inputs_of_the_plan_change(new_world: NewWorld) -> None:
    world = new_world(workers=2, **TWO_MICRO_BATCHES).open(then=3)
    world.direct(granted=3)
    world.pass_time(0.25)
    world.start_all()
    assert isinstance(world.state.current, Running)
    assert world.state.current.kept_layout_for == PlanInputs(num_workers=3, parallelism="auto")


def test_a_decision_has_a_reason_and_changes_no_state(new_world: NewWorld) -> None:
    state = new_world(workers=2).open(then=3).state
    decision = switching.decide(state, state.current, 1000.0, CountingPlanner())
    assert not decision and decision.reason == "the group has 2 workers, and no other is usable"
