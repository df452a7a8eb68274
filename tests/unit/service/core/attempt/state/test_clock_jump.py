"""Which fields of an attempt's state are times, and that all of them move when the wall clock jumps."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from shoal_service.core.attempt.deadlines import is_time, shift_times
from shoal_service.core.attempt.messages import ClockJumped, ReportArrived
from shoal_service.core.attempt.placement import is_due
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.worker_reports import PreemptionNotice

NewWorld = Callable[..., Any]
_NO_TIMES = {"slowest_steps", "booked", "unsettled", "incident", "step_times", "requested", "suspected"}
"""Amounts and durations without a unit in their name, and dictionaries that are named in deadlines.py."""


def test_every_number_with_a_fraction_in_the_state_is_a_time_or_has_a_unit() -> None:
    """A new field must be named after the convention, else a jump of the clock would make it wrong."""
    found = set(_floats(Attempt, set()))
    assert {("GroupProgress", "advanced_at"), ("Waiting", "since"), ("Incident", "at")} <= found
    names = {name for _, name in found}
    unclear = {name for name in names if not is_time(name) and not name.endswith("_s")} - _NO_TIMES
    assert unclear == set(), "name it like a time or a duration, or add it to _NO_TIMES"


def test_a_jump_there_and_back_changes_nothing(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    world.die(1)
    world.deliver_all()
    assert world.state.stage is Stage.QUIESCING
    there = shift_times(world.state, 4096.0)
    assert there != world.state and there.current.since == world.state.current.since + 4096.0
    assert shift_times(there, -4096.0) == world.state


def test_a_wait_is_neither_shortened_nor_extended_by_a_jump(new_world: NewWorld) -> None:
    for jump_s in (7200.0, -7200.0):
        world = new_world(workers=2, min_workers=2, wait_s=30.0).open(then=5)
        world.lose(1)
        assert world.state.stage is Stage.WAITING
        world.now += jump_s
        world.feed(ClockJumped(jump_s))
        world.pass_time(20.0)
        assert world.state.stage is Stage.WAITING
        world.pass_time(15.0)
        assert world.state.stage is Stage.ENDED


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
def test_a_notice_is_neither_shortened_nor_extended_by_a_jump(new_world: NewWorld, jump_s: float) -> None:
    world = new_world(workers=2, memory=True).open(then=1)
    world.feed(ReportArrived(0, PreemptionNotice(generation=1, at=world.now, grace_s=30.0, reason="SIGTERM")))
    world.now += jump_s
    world.feed(ClockJumped(jump_s))
    worker = world.state.pool.worker(0)
    assert worker.leave.deadline == world.now + 30.0
    assert not is_due(world.state, worker, world.now + 15.0) and is_due(world.state, worker, world.now + 30.0)


def test_each_time_in_a_message_that_the_state_keeps_is_known() -> None:
    """The deadline moves, see deadlines.py; the others are shown, and no deadline is counted from them."""
    floats = _floats(Attempt, set(), messages=True)
    found = {f"{owner}.{name}" for owner, name in floats if is_time(name) or name == "deadline"}
    assert found == {"AvoidedNode.deadline", "WorkerExit.at", "SnapshotsStopped.at"}


def test_a_deadline_of_the_user_stays_where_it_is(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    target = replace(world.state.target, avoided=())
    assert shift_times(replace(world.state, target=target), 10.0).target is target


def _floats(kind: type, seen: set[type], *, messages: bool = False) -> Iterator[tuple[str, str]]:
    """Owner and name of each field that holds a float, in this dataclass and in those that it is made of; or those of
    the messages in them."""
    if kind in seen:
        return
    seen.add(kind)
    is_message = issubclass(kind, Frozen)
    for name, hint in get_type_hints(kind).items():
        if name in ("config", "target"):
            continue
        for part in _parts(hint):
            if part is float and is_message is messages:
                yield kind.__name__, name
            elif is_dataclass(part) or (messages and isinstance(part, type) and issubclass(part, Frozen)):
                yield from _floats(part, seen, messages=messages)  # type: ignore[arg-type]


def _parts(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is None and not isinstance(hint, types.UnionType):
        yield hint
    for argument in get_args(hint):
        yield from _parts(argument)
