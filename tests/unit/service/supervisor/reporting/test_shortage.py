"""A group that is smaller than granted: the status says why. A group that stands still: the status says that."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kit.worlds.attempt.new_world import make_world
from shoal_service.core.attempt.events import NodesSilent
from shoal_service.supervisor.reporting.status import Readings, status_of
from shoal_service.views import Condition, ConditionType, JobStatus

Change = Callable[[Any], None]


def status(world: Any) -> JobStatus:
    return status_of(world.state, Readings(), spec_version=1, now=world.now)


def condition(world: Any, type_: ConditionType) -> Condition:
    return next(one for one in status(world).conditions if one.type is type_)


def silent(world: Any) -> None:
    world.stop(2)
    world.pass_time(2.0)
    world.feed(NodesSilent({"n2": "no answer"}))
    world.recover()
    world.run(1)


def lost(world: Any) -> None:
    world.die(2)
    world.recover()
    world.run(1)
    world.pass_time(0.25)


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (silent, "NodeSilent", "1 worker left out until node n2 answers"),
        (lost, "Starting", "1 worker starting, or waiting for room on a node"),
    ],
)
def test_the_reason_of_a_smaller_group_is_in_its_condition_and_its_note(
    change: Change, reason: str, words: str
) -> None:
    world = make_world(workers=3, memory=True).open(then=2)
    ready = condition(world, ConditionType.WORKERS_READY)
    assert ready.status and status(world).note == ""
    change(world)
    ready = condition(world, ConditionType.WORKERS_READY)
    assert (ready.status, ready.reason) == (False, reason)
    assert ready.message == f"2 of 3 granted workers in the group: {words}"
    assert status(world).note == words


def test_workers_that_the_layout_does_not_use_are_named_with_the_way_out() -> None:
    """Two of six workers were idle, and nothing said why."""
    world = make_world(workers=6, memory=True, batch={"global_size": 4, "micro_size": 1}).open(then=2)
    world.pass_time(4.0)
    assert len(world.state.group.workers) == 4
    ready = condition(world, ConditionType.WORKERS_READY)
    assert ready.reason == "LayoutUsesFewer"
    assert "2 workers idle: for 6 workers the planner's layout is dp2 x fsdp2, which uses 4" in ready.message
    assert status(world).note and "`parallelism` of the spec" in status(world).note


def test_a_back_off_is_named() -> None:
    world = make_world(workers=3, memory=True).open(then=2)
    lost(world)
    budgets = replace(world.state.budgets, grow_not_before=world.now + 60.0)
    world.state = replace(world.state, budgets=budgets)
    world.start_all()
    world.pass_time(4.0)
    assert condition(world, ConditionType.WORKERS_READY).reason == "GrowsLater"


def test_a_standstill_is_shown_at_once() -> None:
    world = make_world(workers=3, memory=True, health={}).open(then=6)
    for index in (0, 1, 2):
        world.beat(index, beat=10)
    assert condition(world, ConditionType.PROGRESSING).status
    world.pass_time(2.0)
    progressing = condition(world, ConditionType.PROGRESSING)
    assert (progressing.status, progressing.reason) == (False, "Standstill")
    assert progressing.message == status(world).note
    assert progressing.message.startswith("rank 0 has made no progress for 2.0 s, in backward after step 6; ")
