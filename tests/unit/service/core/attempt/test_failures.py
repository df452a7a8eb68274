"""Failures that a new group cannot fix are reported once, with the user's own traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.messages import DeathExplained, Interrupt, KillWorker
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase

NewWorld = Callable[..., Any]

_UNPACKED = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0a1b2c3d"


def raised(message: str) -> ErrorReport:
    return ErrorReport(
        type="ValueError", message=message, traceback=f'File "{_UNPACKED}/a.py": {message}', phase=Phase.FORWARD
    )


def test_an_error_of_the_users_code_is_grouped_over_ranks(new_world: NewWorld) -> None:
    world = new_world(workers=4).open(then=5)
    messages = ["rare", "shape mismatch", "shape mismatch"]
    for worker, message in zip(world.group(), messages, strict=False):
        world.leave(worker, ExitKind.USER_ERROR, raised(message))
    world.deliver_all()
    assert world.end is None and world.count(Interrupt) == 0, "the last one may be about to raise the same"
    world.pass_time(world.state.config.timeouts.user_error_grace_s)
    assert world.end is None and world.count(Interrupt) == 1, "it is woken first"
    world.obey_interrupts()
    world.deliver_all()
    assert world.end.reason is EndReason.USER_ERROR
    assert world.end.message == "ValueError: shape mismatch"
    assert world.end.failure.ranks == (1, 2) and world.end.failure.traceback == 'File "a.py": shape mismatch'
    assert world.end.failure.step == 5
    assert world.incidents() == [], "no worker was lost"


def test_the_users_error_outweighs_the_collectives_that_it_broke(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    world.leave(world.group()[2], ExitKind.USER_ERROR, raised("boom"))
    world.break_collectives()
    world.deliver("exit-0")
    world.deliver("exit-1")
    world.deliver("exit-2")
    assert world.end.reason is EndReason.USER_ERROR and world.end.failure.ranks == (2,)


def test_the_users_error_outweighs_a_stuck_survivor(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    world.workers[1].is_stuck = True
    world.leave(world.group()[0], ExitKind.USER_ERROR, raised("boom"))
    world.deliver_all()
    world.pass_time(5.1)
    assert world.end.reason is EndReason.USER_ERROR


def test_a_loss_that_is_not_finite_ends_the_attempt_and_names_the_step(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    for worker in world.group():
        world.leave(worker, ExitKind.NON_FINITE, raised("loss is nan"))
    world.deliver_all()
    assert world.end.reason is EndReason.NON_FINITE and world.end.message == "step 6: loss is nan"


def test_every_worker_is_killed_before_the_end_is_reported(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=1).open(then=5)
    for worker in world.group():
        world.leave(worker, ExitKind.USER_ERROR, raised("boom"))
    world.deliver_all()
    assert world.count(KillWorker) == 3 and world.state.pool.workers == ()


def test_an_assignment_that_was_fenced_before_it_arrived_is_followed_by_another(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    for worker in world.group():
        world.leave(worker, ExitKind.STALE)
    world.deliver_all()
    assert world.end is None and world.state.group.generation == 2


@pytest.mark.parametrize("steps", [0, 1])
def test_an_incident_gets_the_words_of_the_operating_system_also_after_it_was_closed(
    new_world: NewWorld, steps: int
) -> None:
    world = new_world(workers=3, memory=True).open(then=2)
    worker_id = world.workers[1].worker_id
    world.lose(1)
    world.run(steps)
    words = "process 4001 on 10.0.0.1 was killed by the kernel: out of memory"
    world.feed(DeathExplained(worker_id, words))
    [incident] = world.incidents()
    assert (incident.message, incident.closed) == (words, bool(steps))
    assert len(world.events("worker.warm_memory_off")) == 1, "known only now"
    assert world.events("worker.exited") == [{"worker_id": worker_id, "message": words}]
    world.feed(DeathExplained("shoal/j1/1/worker-99", "exited with 3"))
    assert world.incidents()[0].message == words


def test_the_exit_of_a_process_is_reported_once(new_world: NewWorld) -> None:
    """Also if its port, its calls and a supervisor after a restart have each asked for the exit status."""
    world = new_world(workers=3, memory=True).open(then=2)
    first, second = world.workers[1].worker_id, world.workers[2].worker_id
    world.die(1)
    world.lose(2)
    for worker_id in (first, second, first, second):
        world.feed(DeathExplained(worker_id, "process 4001 on 10.0.0.1 exited with 3"))
    world.restart_supervisor()
    world.feed(DeathExplained(first, "process 4001 on 10.0.0.1 exited with 3"))
    assert [event["worker_id"] for event in world.events("worker.exited")] == [first, second]
