"""A supervisor that did not run for a while blames nobody for it, and still notices what is truly dead afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kit.worlds.attempt.parts import error_of
from shoal_service.core.attempt import deadlines, hangs, losses
from shoal_service.core.attempt.deadlines import find_wait
from shoal_service.core.attempt.messages import (
    Interrupt,
    KillWorker,
    NodesSilent,
    Reopened,
    SuspectNode,
    Tick,
    WorkerUnreachable,
)
from shoal_service.core.attempt.state.parts import Stage, Worker, WorkerPool
from shoal_service.core.attempt.state.timeouts import Timeouts, later_s, poll_wait_s
from shoal_service.core.desired import Desired
from shoal_service.core.persistent import Table
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import ExitKind

NewWorld = Callable[..., Any]
AWAY_S = 10.0


def sleep(world: Any, seconds: float = AWAY_S) -> None:
    """The supervisor does not run. Then its timer comes first, before anything that has arrived."""
    before = world.count(SuspectNode)
    world.now += seconds
    world.feed(Tick())
    assert world.count(SuspectNode) == before


def killed(world: Any) -> list[int]:
    return [c.index for c in world.commands if isinstance(c, KillWorker)]


def broken(new_world: NewWorld) -> Any:
    world = new_world(workers=4, memory=True).open(then=6)
    world.die(3)
    world.deliver("lost-3")
    return world


def test_the_interrupt_is_acknowledged_later(new_world: NewWorld) -> None:
    world = broken(new_world)
    world.stop(1)
    world.quiesce()
    world.pass_time(1.5)
    sleep(world)
    assert killed(world) == []
    world.pass_time(0.5)
    assert killed(world) == [1], "it is stopped"


def test_the_lost_group_is_left_later(new_world: NewWorld) -> None:
    world = broken(new_world)
    world.workers[1].is_stuck = True
    world.recover()
    world.pass_time(4.5)
    sleep(world)
    assert killed(world) == []
    world.pass_time(0.5)
    assert killed(world) == [1], "its training thread cannot be woken"


def test_others_report_their_snapshots_later(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=6)
    world.stop(3)  # a spare, which is asked
    world.die_node("n1")
    world.die_node("n2")
    world.quiesce()
    world.pass_time(4.5)
    sleep(world)
    assert world.state.snapshots.requested and world.state.stage is Stage.QUIESCING
    world.pass_time(0.5)
    assert world.state.stage is not Stage.QUIESCING


def test_a_group_stands_still_for_no_longer(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True, health={"hang_floor_s": 5.0}).open(then=12 - 2)
    limit_s = hangs.threshold_s(world.state)
    world.pass_time(limit_s - 0.5)
    sleep(world)
    assert world.state.stage is Stage.RUNNING and world.state.incident is None
    world.pass_time(1.0)
    assert world.state.incident.cause is IncidentCause.HUNG


def test_polls_are_answered_later(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True, health={"hang_floor_s": 5.0}).open(then=6)
    for index in range(3):
        world.beat(index, beat=20)
    sleep(world, 60.0)
    world.beat(0, beat=20)
    assert hangs.find_unanswering(world.state, world.now) == frozenset()
    for _ in range(12):
        world.pass_time(0.25)
        world.beat(0, beat=20)
        world.beat(1, beat=20)
    assert hangs.find_unanswering(world.state, world.now) == {2}


@pytest.mark.parametrize("trains", [True, False])
def test_an_unreachable_worker_answers_later(new_world: NewWorld, trains: bool) -> None:
    world = new_world(workers=3, min_workers=3).open(then=6)
    if not trains:
        world.lose(2)
        assert world.state.stage is Stage.WAITING
    world.feed(WorkerUnreachable(1))
    world.pass_time(2.5)
    sleep(world)
    assert killed(world) == []
    world.pass_time(0.5)
    assert killed(world) == [1]


@pytest.mark.parametrize("answers", [True, False])
def test_a_silent_node_is_given_up_later(new_world: NewWorld, answers: bool) -> None:
    world = new_world(workers=3, memory=True).open(then=2)
    world.pass_time(2.0)
    world.stop(2)
    world.feed(NodesSilent({"n2": "no answer"}))
    world.recover()
    world.run(1)
    if answers:
        world.feed(NodesSilent({}))
    world.pass_time(50.0)
    sleep(world, 3600.0)
    assert killed(world) == []
    world.pass_time(10.0)
    assert killed(world) == [2]


def test_a_node_is_not_silent_because_the_supervisor_has_read_no_poll(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=2)
    for index in range(3):
        world.beat(index, beat=20)
    world.now += AWAY_S
    world.feed(NodesSilent({"n2": "no answer"}))
    assert world.state.stage is Stage.RUNNING
    world.pass_time(1.25)
    world.feed(NodesSilent({"n2": "no answer"}))
    assert world.state.stage is Stage.QUIESCING


def test_the_other_ranks_raise_the_same_error_later(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=6)
    world.leave(world.workers[0], ExitKind.USER_ERROR, error_of("ValueError", "no"))
    world.deliver_all()
    world.pass_time(0.5)
    sleep(world)
    assert world.count(Interrupt) == 0
    world.pass_time(0.5)
    assert world.count(Interrupt) == 2


def test_the_group_forms_later(new_world: NewWorld) -> None:
    world = new_world(workers=2).open()
    world.start_all()
    world.pass_time(19.0)
    sleep(world)
    assert world.state.stage is Stage.FORMING
    world.pass_time(1.25)
    assert world.state.incident.cause is IncidentCause.FORM_FAILED


def test_the_workers_start_later(new_world: NewWorld) -> None:
    world = new_world(workers=2).open()
    world.pass_time(59.0)
    sleep(world)
    assert world.end is None
    world.pass_time(1.25)
    assert world.end.reason is EndReason.CAPACITY_TIMEOUT


def test_a_group_does_not_form_without_workers_that_became_warm_meanwhile(new_world: NewWorld) -> None:
    world = new_world(workers=3).open()
    world.start(0)
    world.start(1)
    world.deliver_all()
    world.pass_time(1.0)
    sleep(world)
    assert world.state.stage is Stage.STARTING
    world.start(2)
    world.deliver_all()
    assert world.state.stage is Stage.FORMING and world.world_size == 3


def test_a_group_forms_without_a_worker_that_does_not_start(new_world: NewWorld) -> None:
    world = new_world(workers=3).open()
    world.start(0)
    world.start(1)
    world.deliver_all()
    world.pass_time(1.0)
    sleep(world)
    world.pass_time(2.0)
    assert world.state.stage is Stage.FORMING and world.world_size == 2


def waiting(new_world: NewWorld) -> Any:
    world = new_world(workers=3, min_workers=3, wait_s=30.0).open(then=6)
    world.lose(1)
    assert world.state.stage is Stage.WAITING
    return world


def test_capacity_is_waited_for_longer(new_world: NewWorld) -> None:
    world = waiting(new_world)
    world.pass_time(29.0)
    sleep(world)
    assert world.end is None
    world.pass_time(1.25)
    assert world.end.reason is EndReason.CAPACITY_TIMEOUT


def test_a_restart_does_not_begin_the_wait_for_capacity_anew(new_world: NewWorld) -> None:
    """Its journal is as old as the wait: it does not tell how long its predecessor lived."""
    world = waiting(new_world)
    world.now += 31.0
    world.feed(Reopened())
    assert world.end.reason is EndReason.CAPACITY_TIMEOUT


def test_the_storage_answers_later(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    limit_s = world.state.target.spec.checkpoint.wait_s
    world.pass_time(limit_s - 1.0)
    sleep(world)
    assert world.end is None
    world.pass_time(1.25)
    assert world.end.reason is EndReason.STORAGE_FAILED


def test_the_step_boundary_comes_later(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=3)
    world.direct(desired=Desired.PAUSE)
    world.pass_time(39.0)
    sleep(world)
    assert world.state.stage is Stage.SWITCHING
    world.pass_time(1.25)
    assert world.state.stage is Stage.QUIESCING


def test_the_checkpoint_is_committed_later(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=3)
    world.direct(desired=Desired.PAUSE)
    world.advance()
    assert world.state.stage is Stage.COMMITTING
    world.pass_time(19.0)
    sleep(world)
    assert world.state.stage is Stage.COMMITTING
    world.pass_time(1.25)
    assert world.state.stage is not Stage.COMMITTING


def test_the_snapshots_of_a_node_without_workers_are_reported_later(new_world: NewWorld) -> None:
    world = new_world(workers=1, memory=True, wait_s=300.0).open(then=7)
    world.die(0)
    world.deliver_all()
    world.pass_time(14.0)
    sleep(world)
    assert world.state.current.orphans_until is not None
    world.pass_time(1.0)
    assert world.state.current.orphans_until is None


def test_a_slow_worker_is_replaced_later(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True, health={"straggler_steps": 1, "hang_floor_s": 3600.0}).open(then=6)
    world.report(0.1, 0.9, 0.1)
    world.pass_time(59.0)
    sleep(world)
    assert world.state.pool.worker(1).slow_until is not None
    world.pass_time(1.25)
    assert world.state.pool.worker(1).slow_until is None


def test_workers_with_new_code_start_later(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=6)
    world.direct(code="a" * 64)
    world.pass_time(59.0)
    sleep(world)
    assert world.state.code.update is not None
    world.pass_time(1.25)
    assert world.state.code.update is None


def test_a_supervisor_that_is_always_slow_still_notices_a_stopped_worker(new_world: NewWorld) -> None:
    world = broken(new_world)
    world.stop(1)
    world.quiesce()
    turns = 0
    while not killed(world):
        world.now += 3.0
        world.feed(Tick())
        turns += 1
    assert killed(world) == [1]
    limits = world.state.config.timeouts
    assert turns == 1 + limits.unresponsive_s / limits.absence_s, "absence_s of each turn but the first count"


def test_a_death_is_an_event_and_waits_for_nothing(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    world.die(2)
    world.now += AWAY_S
    world.deliver("lost-2")
    assert world.state.stage is Stage.QUIESCING and world.state.incident.cause is IncidentCause.WORKER_DIED


def test_answers_of_a_thousand_workers_may_take_longer(new_world: NewWorld) -> None:
    world = broken(new_world)
    small = world.state
    workers = tuple(Worker(index=index, worker_id=f"w{index}", in_run=True) for index in range(1024))
    group = replace(small.group, workers=tuple(range(1024)))
    large = replace(small, pool=WorkerPool(workers=Table(workers), next_index=1024), group=group)
    queued_s = later_s(1024)
    assert queued_s > 1.5
    assert large.quiesce_s == small.quiesce_s + queued_s
    assert find_wait(large).until == find_wait(small).until + queued_s
    assert hangs.silent_s(large) == hangs.silent_s(small) + queued_s + poll_wait_s(1024) - 1.0
    assert losses.fresh_s(1024) > poll_wait_s(1024)
    [unreachable] = [replace(workers[0], unreachable_since=world.now)]
    limit_s = small.config.timeouts.unreachable_s
    assert deadlines.is_given_up(small, unreachable, world.now + limit_s)
    assert not deadlines.is_given_up(large, unreachable, world.now + limit_s + 1.5)
    assert deadlines.is_given_up(large, unreachable, world.now + limit_s + queued_s + 0.1)


def test_the_last_worker_of_a_large_group_is_waited_for_as_in_a_small_one(new_world: NewWorld) -> None:
    """The answers of the others may queue up for `later_s`; once they have left, nothing holds up the last one."""
    world = new_world(workers=512, memory=True, batch={"global_size": 512, "micro_size": 1}).open(then=5)
    late_s, began = later_s(512), world.now
    world.stop(7)
    world.break_collectives()
    world.obey_interrupts()
    world.deliver_all()
    assert world.state.in_run == (7,)
    world.pass_time(Timeouts().unresponsive_s - 0.1)
    assert world.state.in_run == (7,)
    world.pass_time(0.2)
    assert world.now < began + Timeouts().unresponsive_s + late_s
    assert world.events("worker.lost")[0]["cause"] == IncidentCause.STUCK


def test_many_workers_that_have_not_left_yet_are_waited_for_longer(new_world: NewWorld) -> None:
    world = new_world(workers=512, memory=True, batch={"global_size": 512, "micro_size": 1}).open(then=5)
    for index in range(7, 17):
        world.stop(index)
    world.break_collectives()
    world.obey_interrupts()
    world.deliver_all()
    world.pass_time(Timeouts().unresponsive_s + 0.5)
    assert len(world.state.in_run) == 10 and not world.events("worker.lost")
    world.pass_time(later_s(512))
    assert len(world.events("worker.lost")) == 10
