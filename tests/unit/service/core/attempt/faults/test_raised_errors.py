"""Who is to blame for an exception follows from its class, from whose code raised it, and from how many ranks did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.deadlines import find_wait
from shoal_service.core.attempt.messages import KillWorker, SuspectNode, WorkerFailedToStart
from shoal_service.core.attempt.state import later_s
from shoal_workers.contract.exception_causes import ErrorClass, Origin
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase

NewWorld = Callable[..., Any]
FAULTS = [error_class for error_class in ErrorClass if error_class is not ErrorClass.PLAIN]


def report(
    error_class: ErrorClass = ErrorClass.PLAIN, origin: Origin = Origin.TASK, message: str = "it broke"
) -> ErrorReport:
    return ErrorReport(
        type="RuntimeError",
        message=message,
        traceback="tb",
        phase=Phase.FORWARD,
        error_class=error_class,
        origin=origin,
    )


def raise_on(world: Any, ranks: list[int], kind: ExitKind, error: ErrorReport) -> None:
    """These ranks raise; the others leave once they are interrupted."""
    group = world.group()
    for rank in ranks:
        world.leave(group[rank], kind, error)
    world.deliver_all()
    if len(ranks) < len(group):
        world.pass_time(world.state.config.timeouts.user_error_grace_s)
        world.obey_interrupts()
        world.deliver_all()


def killed(world: Any) -> list[int]:
    return [command.index for command in world.commands if isinstance(command, KillWorker)]


def suspected(world: Any) -> list[str]:
    return [command.node_id for command in world.commands if isinstance(command, SuspectNode)]


@pytest.mark.parametrize("origin", list(Origin))
@pytest.mark.parametrize("error_class", FAULTS)
def test_a_fault_on_one_rank_is_that_workers(new_world: NewWorld, error_class: ErrorClass, origin: Origin) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=5)
    raise_on(world, [1], ExitKind.WORKER_FAULT, report(error_class, origin))
    assert world.end is None, "the user's retries are not charged"
    assert (killed(world), suspected(world)) == ([1], ["n1"])
    world.recover()
    world.run(1)
    [incident] = world.incidents()
    assert (incident.cause, incident.ranks) == (IncidentCause.WORKER_FAULT, (1,))
    assert "it broke" in incident.message and world.state.group.workers == (0, 3, 2)
    assert incident.steps_lost == 0


@pytest.mark.parametrize("error_class", FAULTS)
def test_a_fault_on_every_rank_in_the_tasks_code_is_the_tasks(new_world: NewWorld, error_class: ErrorClass) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    raise_on(world, [0, 1, 2], ExitKind.WORKER_FAULT, report(error_class))
    assert world.end.reason is EndReason.USER_ERROR and world.end.failure.ranks == (0, 1, 2)
    assert suspected(world) == [] and world.incidents() == []


@pytest.mark.parametrize("error_class", FAULTS)
def test_a_fault_on_every_rank_elsewhere_is_not_reported_as_the_tasks(
    new_world: NewWorld, error_class: ErrorClass
) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    raise_on(world, [0, 1, 2], ExitKind.WORKER_FAULT, report(error_class, Origin.ENGINE))
    assert world.end.reason is EndReason.WORKERS_FAILED and "all 3 ranks" in world.end.message
    assert suspected(world) == []


def test_different_faults_on_every_rank_are_faults_of_each(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=2, memory=True).open(then=5)
    first, second = world.group()
    world.leave(first, ExitKind.WORKER_FAULT, report(ErrorClass.DEVICE))
    world.leave(second, ExitKind.WORKER_FAULT, report(ErrorClass.SYSTEM))
    world.deliver_all()
    assert world.end is None and killed(world) == [0, 1]


def test_some_ranks_are_replaced_and_the_others_stay(new_world: NewWorld) -> None:
    world = new_world(workers=4, memory=True).open(then=5)
    raise_on(world, [1, 3], ExitKind.WORKER_FAULT, report(ErrorClass.DEVICE))
    assert killed(world) == [1, 3] and world.end is None
    assert sorted(suspected(world)) == ["n1", "n3"]


def test_a_fault_that_follows_the_step_is_not_the_workers(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=3, memory=True).open(then=5)
    for number in range(3):
        assert world.end is None, number
        raise_on(world, [1], ExitKind.WORKER_FAULT, report(ErrorClass.DEVICE_MEMORY))
        if world.end is None:
            world.recover()
    assert world.end.reason is EndReason.USER_ERROR and len(suspected(world)) <= 2


def test_a_fault_at_another_step_is_counted_anew(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=4, memory=True).open(then=5)
    for _ in range(4):
        raise_on(world, [1], ExitKind.WORKER_FAULT, report(ErrorClass.DEVICE))
        assert world.end is None
        world.recover()
        world.run(1)


def test_the_task_of_a_single_worker_is_not_blamed_at_once(new_world: NewWorld) -> None:
    world = new_world(workers=1, standby=1, memory=True).open(then=5)
    raise_on(world, [0], ExitKind.WORKER_FAULT, report(ErrorClass.DEVICE))
    assert world.end is None and killed(world) == [0]


def test_the_collectives_that_it_broke_are_not_blamed(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=5)
    first, second, third = world.group()
    world.leave(first, ExitKind.COLLECTIVE_FAILED, report(message="connection closed by peer"))
    world.deliver_all()
    world.leave(third, ExitKind.WORKER_FAULT, report(ErrorClass.DEVICE))
    world.leave(second, ExitKind.INTERRUPTED)
    world.deliver_all()
    world.recover()
    world.run(1)
    [incident] = world.incidents()
    assert (incident.cause, incident.ranks) == (IncidentCause.WORKER_FAULT, (2,))


def test_an_error_of_the_engine_on_one_rank_restarts_its_worker_and_suspects_no_node(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=5)
    raise_on(world, [1], ExitKind.ENGINE_ERROR, report(origin=Origin.ENGINE))
    assert (killed(world), suspected(world), world.end) == ([1], [], None)
    world.recover()
    world.run(1)
    [incident] = world.incidents()
    assert incident.cause is IncidentCause.ENGINE_ERROR


def test_an_error_of_the_engine_on_every_rank_is_never_reported_as_the_tasks(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=5)
    raise_on(world, [0, 1], ExitKind.ENGINE_ERROR, report(origin=Origin.ENGINE))
    assert world.end.reason is EndReason.INTERNAL and "it broke" in world.end.message


def test_an_error_of_the_task_outweighs_the_faults_of_others(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=5)
    first, second = world.group()
    world.leave(first, ExitKind.WORKER_FAULT, report(ErrorClass.DEVICE))
    world.leave(second, ExitKind.USER_ERROR, report(message="shape mismatch"))
    world.deliver_all()
    assert world.end.reason is EndReason.USER_ERROR and world.end.failure.ranks == (1,)


def test_a_worker_whose_node_fails_while_it_starts_is_not_the_tasks_mistake(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open()
    world.feed(WorkerFailedToStart(0, report(ErrorClass.SYSTEM, message="Stale file handle")))
    assert world.end is None and killed(world) == [0]


def test_an_error_of_the_engine_while_it_starts_is_reported_as_such(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open()
    world.feed(WorkerFailedToStart(0, report(origin=Origin.ENGINE)))
    assert world.end.reason is EndReason.INTERNAL


def test_the_grace_is_that_of_one_rank_until_another_raises_too(new_world: NewWorld) -> None:
    """What the answers of a large group may be later counts only while they come."""
    world = new_world(workers=128, memory=True, batch={"global_size": 128, "micro_size": 1}).open(then=5)
    grace_s, late_s, began = world.state.config.timeouts.user_error_grace_s, later_s(128), world.now
    after = ((0.0, grace_s), (late_s / 2, late_s / 2 + grace_s), (0.9 * grace_s, late_s + grace_s))
    for rank, (after_s, expected_s) in enumerate(after):
        world.pass_time(began + after_s - world.now)
        world.leave(world.group()[rank], ExitKind.WORKER_FAULT, report())
        world.deliver_all()
        wait = find_wait(world.state)
        assert wait is not None and wait.until == pytest.approx(began + expected_s)


def fail_thrice_at_one_step(world: Any, ranks: list[int], error: ErrorReport) -> None:
    for rank in ranks:
        assert world.end is None
        raise_on(world, [rank], ExitKind.WORKER_FAULT, error)
        if world.end is None:
            world.recover()


@pytest.mark.parametrize("error_class", [ErrorClass.DEVICE, ErrorClass.NETWORK])
def test_hardware_that_fails_on_three_nodes_at_one_step_is_no_crash_loop(
    new_world: NewWorld, error_class: ErrorClass
) -> None:
    world = new_world(workers=4, standby=4, memory=True).open(then=5)
    fail_thrice_at_one_step(world, [0, 2, 0], report(error_class))
    assert world.end is None
    world.run(1)
    assert len(suspected(world)) == 3


def test_a_fault_that_no_hardware_explains_is_one_on_any_node(new_world: NewWorld) -> None:
    world = new_world(workers=4, standby=4, memory=True).open(then=5)
    fail_thrice_at_one_step(world, [0, 2, 0], report(ErrorClass.HOST_MEMORY))
    assert world.end is not None and world.end.reason is EndReason.USER_ERROR


def test_hardware_that_fails_thrice_on_one_rank_is_the_programs(new_world: NewWorld) -> None:
    """A kernel with a wrong address follows its samples from node to node."""
    world = new_world(workers=4, standby=4, memory=True).open(then=5)
    fail_thrice_at_one_step(world, [2, 2, 2], report(ErrorClass.DEVICE))
    assert world.end is not None and world.end.reason is EndReason.USER_ERROR
