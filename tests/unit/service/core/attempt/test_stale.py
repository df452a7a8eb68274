"""Reports of former generations and of removed workers change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_service.core.attempt.messages import ReportArrived, RunReturned, WorkerFailedToStart, WorkerLost, WorkerWarm
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ErrorReport, Phase

NewWorld = Callable[..., Any]


def test_reports_of_an_older_generation_are_dropped(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    world.lose(2)
    old = [e for e in world.history if isinstance(e, ReportArrived) and e.item.generation == 1]
    assert old
    before = world.state
    for event in old:
        assert world.feed(event) == ()
    assert world.state == before


def test_reports_of_a_worker_outside_the_group_are_dropped(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=1).open(then=5)
    item = next(e.item for e in world.history if isinstance(e, ReportArrived))
    before = world.state
    world.feed(ReportArrived(2, item))
    assert world.state == before


def test_reports_of_removed_workers_change_nothing(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    info = world.state.pool.worker(0).info
    world.lose(1)
    error = ErrorReport(type="E", message="m", traceback="", phase=Phase.PREPARING)
    exits = [e for e in world.history if isinstance(e, RunReturned)]
    before = world.state
    for event in (
        WorkerWarm(1, info),
        WorkerFailedToStart(1, error),
        WorkerLost(1, IncidentCause.WORKER_DIED, "join call", "again"),
        WorkerLost(99, IncidentCause.WORKER_DIED, "join call", "never acknowledged of"),
        *exits,
    ):
        assert world.feed(event) == ()
    assert world.state == before


def test_an_answer_of_run_that_comes_twice_counts_once(new_world: NewWorld) -> None:
    """A restarted supervisor repeats requests whose answers may be in transit."""
    world = new_world(workers=3).open(then=5)
    world.die(2)
    world.deliver_all()
    world.obey_interrupts()
    world.deliver("exit-0")
    world.feed(world.history[-1])
    assert world.state.stage is Stage.QUIESCING
    world.deliver("exit-1")
    assert world.state.stage is Stage.FORMING and world.state.group.generation == 2
