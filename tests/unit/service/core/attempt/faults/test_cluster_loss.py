"""An attempt after one that was lost with its cluster: an incident from its start to its first completed step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal_service.core import goodput
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.messages import ShowIncident
from shoal_service.core.endings import LostAttempt, after_end
from shoal_service.core.goodput import Category, Ledger
from shoal_workers.contract.job import EndReason, IncidentCause, StateSource

NewWorld = Callable[..., Any]
LOST = LostAttempt(
    attempt=1,
    generation=3,
    workers=2,
    layout="fsdp2",
    step=9,
    at=990.0,
    last_report_at=980.0,
    message="the supervisor of attempt 1 is gone",
)


def test_what_was_lost_is_an_incident_until_the_first_completed_step(new_world: NewWorld) -> None:
    world = new_world(workers=2, lost=LOST)
    opened, shown, _ = machine.open_attempt(world.state)
    assert opened.event.cause is IncidentCause.CLUSTER_LOST and opened.event.message == LOST.message
    assert (opened.event.generation, opened.event.workers, opened.event.step) == (3, 2, 9)
    assert shown == ShowIncident(world.state.incident)
    world.committed["step-000000000004-a0-g1"] = True
    world.open(then=5)
    closed = world.incidents()[-1]
    assert closed.closed and closed.id == opened.event.id == 1
    assert (closed.steps_lost, closed.state_source, closed.action) == (5, StateSource.CHECKPOINT, "roll back")
    assert closed.detect_s == 10.0
    assert world.state.incident is None and world.state.history.steps_lost == 5


def test_a_failure_that_was_retried_is_an_incident_of_the_next_attempt(new_world: NewWorld) -> None:
    failed = LOST.model_copy(update={"message": "ValueError: boom"})
    assert after_end(None, failed, EndReason.USER_ERROR, saved_step=9) is None, "no attempt follows"
    lost = after_end(None, failed, EndReason.USER_ERROR, saved_step=9, is_retried=True)
    world = new_world(workers=2, lost=lost)
    opened, *_ = machine.open_attempt(world.state)
    assert (opened.event.cause, opened.event.message) == (IncidentCause.RETRIED, "ValueError: boom")
    world.open(then=1)
    assert world.incidents()[-1].closed


def test_the_time_without_training_is_booked_under_the_loss(new_world: NewWorld) -> None:
    world = new_world(workers=8, lost=LOST)
    world.state = replace(world.state, ledger=Ledger(at=1000.0, max_step=9))
    world.committed["step-000000000004-a0-g1"] = True
    world.open()
    world.pass_time(2.0)
    world.start_all()
    world.join()
    shown = goodput.show(world.state.ledger)
    assert shown.recovering == {IncidentCause.CLUSTER_LOST: 16.0}
    world.pass_time(0.5)
    world.train(1, save_every=1000)
    world.deliver_all()
    assert goodput.show(world.state.ledger).seconds[Category.RECOMPUTED] == 4.0
    assert goodput.show(world.state.ledger).seconds[Category.IDLE] == 0.0
