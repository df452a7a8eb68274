"""A worker that does not answer, receive or leave is replaced after the deadline of that wait; every wait is
bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.messages import (
    DeathDated,
    InterruptAcknowledged,
    KillWorker,
    SuspectNode,
    WorkerUnreachable,
)
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_workers.contract.job import IncidentCause

NewWorld = Callable[..., Any]


def killed(world: Any) -> list[int]:
    return [c.index for c in world.commands if isinstance(c, KillWorker)]


def broken(new_world: NewWorld, **settings: Any) -> Any:
    """A group of four whose last worker has died; no message was delivered since."""
    world = new_world(workers=4, memory=True, **settings).open(then=6)
    world.die(3)
    world.deliver("lost-3")
    assert world.state.stage is Stage.QUIESCING
    return world


def test_a_worker_that_does_not_receive_the_interrupt_is_replaced_after_the_first_deadline(new_world: NewWorld) -> None:
    world = broken(new_world)
    world.stop(1)
    world.quiesce()
    world.pass_time(Timeouts().unresponsive_s - 0.25)
    assert killed(world) == []
    world.pass_time(0.25)
    assert killed(world) == [1]
    assert world.events("worker.lost")[-1]["cause"] == IncidentCause.STUCK
    assert world.state.stage is Stage.FORMING
    assert world.state.group.source.step == 6, "both parts lie with their buddies"


def test_a_worker_that_acknowledged_the_interrupt_has_more_time(new_world: NewWorld) -> None:
    world = broken(new_world)
    world.workers[1].is_stuck = True
    world.recover()
    world.pass_time(4.75)
    assert killed(world) == []
    world.pass_time(0.25)
    assert killed(world) == [1] and world.state.stage is Stage.FORMING


def test_an_old_acknowledgement_does_not_count(new_world: NewWorld) -> None:
    world = broken(new_world)
    world.feed(InterruptAcknowledged(1, 0))
    assert world.state.pool.worker(1).acknowledged == 0


def test_unreachable_and_a_broken_group_are_enough_together(new_world: NewWorld) -> None:
    """The network of a host is cut: its survivors' collectives break, and calls to it fail."""
    world = new_world(workers=3, memory=True).open(then=6)
    world.stop(2, unreachable=True)
    world.deliver_all()
    assert world.state.stage is Stage.RUNNING, "an unreachable worker is not yet lost"
    world.break_collectives()
    world.deliver("exit-0")
    assert killed(world) == [2] and world.state.incident.cause is IncidentCause.UNREACHABLE
    world.deliver_all()
    assert world.state.stage is Stage.FORMING
    assert [c.node_id for c in world.commands if isinstance(c, SuspectNode)] == ["n2"]


def test_unreachable_after_the_group_broke_is_enough_as_well(new_world: NewWorld) -> None:
    world = broken(new_world)
    world.feed(WorkerUnreachable(1))
    assert killed(world) == [1]


@pytest.mark.parametrize("running", [True, False])
def test_a_worker_that_is_unreachable_for_long_is_lost(new_world: NewWorld, running: bool) -> None:
    world = new_world(workers=2, standby=1, memory=True).open(then=6)
    index = 1 if running else 2
    world.stop(index, unreachable=True)
    world.deliver_all()
    world.pass_time(2.75)
    assert killed(world) == []
    world.pass_time(0.25)
    assert killed(world) == [index]
    assert world.events("worker.lost")[0]["cause"] == IncidentCause.UNREACHABLE
    assert (world.state.incident is not None) == running


def test_one_that_answers_again_is_forgiven(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=6)
    world.feed(WorkerUnreachable(1))
    world.pass_time(2.0)
    world.beat(1, beat=3)
    world.pass_time(10.0)
    assert world.state.stage is Stage.RUNNING and killed(world) == []


def test_a_standby_that_does_not_answer_replaces_no_rank(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=1, memory=True).open(then=6)
    world.feed(WorkerUnreachable(2))
    world.lose(1)
    assert world.state.group.workers == (0,)


def test_a_busy_queue_puts_no_deadline_off(new_world: NewWorld) -> None:
    """No tick comes while other events do."""
    world = broken(new_world)
    for _ in range(6):
        world.now += 0.2 * Timeouts().unresponsive_s
        world.beat(0, beat=1)
    assert sorted(killed(world)) == [0, 1, 2]


def test_the_time_to_detect_is_bounded_by_the_last_report(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    world.beat(2, beat=7)
    world.now += 0.75
    world.lose(2)
    world.run(1)
    assert world.incidents()[0].detect_s == pytest.approx(0.75)


def test_the_witness_of_a_death_states_its_time(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    world.beat(2, beat=7)
    world.now += 0.75
    died_at = world.now - 0.03
    worker_id = world.state.pool.worker(2).worker_id
    world.die(2)
    world.deliver("lost-2")
    for who, at in ((worker_id, died_at), (worker_id, world.now + 5.0), (worker_id, 0.0), ("nobody", world.now)):
        world.feed(DeathDated(who, at))
    world.recover()
    world.run(1)
    world.feed(DeathDated(worker_id, died_at))
    [incident] = {incident.id: incident for incident in world.incidents()}.values()
    assert incident.detect_s == pytest.approx(0.03)


def test_a_broken_collective_is_a_later_sign_of_life_than_a_progress_stamp(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    world.beat(2, beat=7)
    world.now += 0.5
    world.break_collectives()
    world.now += 0.25
    world.deliver("exit-0")
    assert world.incidents()[0].detect_s == pytest.approx(0.25)
