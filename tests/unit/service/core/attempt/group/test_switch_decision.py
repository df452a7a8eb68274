"""A running group plans another layout only if there is something to plan for, and once for each change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


def often_broken(world: Any, *, every_s: float, cost_s: float) -> Attempt:
    """The state of an attempt with ten incidents, of which the last took `cost_s` from its decision to a group."""
    world.break_collectives()
    world.recover()
    world.run(1)
    closed = world.state.health.last_closed
    assert closed is not None and closed.incident.after is not None
    incident = replace(closed.incident, formed_at=closed.incident.after.forming_at + cost_s)
    closed = replace(closed, incident=incident, closed_at=incident.at + 3600.0)  # a script reports once in an hour
    history = replace(world.state.history, num_incidents=10, incidents_since=world.now - 10 * every_s)
    return replace(world.state, history=history, health=replace(world.state.health, last_closed=closed))


def test_a_group_grows_if_that_gains_more_than_it_costs_until_the_next_incident(new_world: NewWorld) -> None:
    world = new_world(workers=6, memory=True).open(then=6)
    rare, often = (often_broken(world, every_s=every_s, cost_s=30.0) for every_s in (400.0, 40.0))
    assert switching.is_worth_growing(rare, 8, world.now), "100 s are saved"
    worth = switching.is_worth_growing(often, 8, world.now)
    assert not worth and "saves 10 s" in worth.reason and "takes 30 s" in worth.reason
    assert switching.is_worth_growing(often, 24, world.now), "so many workers are worth 30 s"


def test_a_group_below_its_minimum_grows_at_once(new_world: NewWorld) -> None:
    state = often_broken(new_world(workers=6, memory=True).open(then=6), every_s=40.0, cost_s=30.0)
    elasticity = state.target.spec.elasticity.model_copy(update={"min_workers": 7})
    spec = state.target.spec.model_copy(update={"elasticity": elasticity})
    assert switching.is_worth_growing(replace(state, target=replace(state.target, spec=spec)), 8, 5000.0)


def test_the_first_incidents_delay_no_growth(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True, nodes=3).open(then=6)
    assert switching.is_worth_growing(world.state, 4, world.now)
    state = often_broken(world, every_s=1.0, cost_s=30.0)
    assert switching.is_worth_growing(replace(state, history=replace(state.history, num_incidents=2)), 4, world.now)


def test_returning_workers_wait_for_the_re_formation_of_the_next_incident(new_world: NewWorld) -> None:
    world = new_world(workers=4, memory=True).open(then=6)
    world.lose(3)
    world.run(1)
    world.state = often_broken(world, every_s=20.0, cost_s=30.0)
    world.start_all()
    world.pass_time(4.0)  # the newest worker is settled
    assert len(world.state.group.workers) == 3 and world.state.stage is Stage.RUNNING
    world.break_collectives()
    world.recover()
    assert len(world.state.group.workers) == 4
