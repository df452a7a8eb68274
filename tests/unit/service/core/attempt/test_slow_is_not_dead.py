"""Progress of what is waited for moves the deadline on; a progress counter that stands still does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.deadlines import find_wait
from shoal_service.core.attempt.messages import ProgressReported
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_service.core.desired import Desired
from shoal_service.supervisor.reporting.status import Readings, make_status
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import Phase, Progress
from shoal_workers.contract.spec import JobSpec

NewWorld = Callable[..., Any]


def prepares(world: Any, index: int, counter: int, note: str = "tokenising") -> None:
    """A worker that is not warm yet answers a poll."""
    progress = Progress(generation=0, phase=Phase.PREPARING, step=0, at=world.now, counter=counter, note=note)
    world.feed(ProgressReported(index, progress))


def works(world: Any, phase: Phase, counter: int, index: int = 0) -> None:
    world.beat(index, beat=counter, phase=phase)


def test_a_worker_that_prepares_for_long_is_waited_for_as_long_as_it_makes_progress(new_world: NewWorld) -> None:
    world = new_world(workers=2, min_workers=2).open()
    start_s = world.state.config.timeouts.start_s
    for counter in range(10):
        world.pass_time(start_s - 1.0)
        prepares(world, 0, counter)
    assert world.end is None and world.state.stage is Stage.STARTING
    world.pass_time(start_s - 0.1)
    assert world.end is None
    world.pass_time(0.25)
    assert world.end.reason is EndReason.CAPACITY_TIMEOUT and "timeouts.start_s 60 s" in world.end.message


def test_a_preparation_that_stands_still_moves_no_deadline(new_world: NewWorld) -> None:
    world = new_world(workers=1).open()
    for _ in range(10):
        world.pass_time(6.0)
        prepares(world, 0, 3)
    assert world.end is None, "it has stood still since 6 s"
    world.pass_time(6.25)
    assert world.end is not None and world.end.reason is EndReason.CAPACITY_TIMEOUT


@pytest.mark.parametrize(("phase", "limit"), [(Phase.BUILDING, "form_s"), (Phase.RESTORING, "restore_s")])
def test_a_long_build_or_restore_is_waited_for_as_long_as_it_makes_progress(
    new_world: NewWorld, phase: Phase, limit: str
) -> None:
    world = new_world(workers=2).open()
    world.start_all()
    assert world.state.stage is Stage.FORMING
    limit_s = getattr(world.state.config.timeouts, limit)
    for counter in range(5):
        works(world, phase, counter)
        world.pass_time(limit_s - 1.0)
    assert world.state.stage is Stage.FORMING and world.state.incident is None
    world.pass_time(1.25)
    assert world.state.incident.cause is IncidentCause.FORM_FAILED
    assert f"timeouts.{limit} {limit_s:g} s without progress" in world.state.incident.message


def test_a_large_group_may_take_longer_to_form(new_world: NewWorld) -> None:
    world = new_world(workers=104, batch={"global_size": 104, "micro_size": 1}).open()
    world.start_all()
    assert world.state.stage is Stage.FORMING
    world.pass_time(world.state.config.timeouts.form_s + 1.0)
    assert world.state.stage is Stage.FORMING
    world.pass_time(1.25)
    assert world.state.incident.cause is IncidentCause.FORM_FAILED
    assert "timeouts.form_s 20 s + 2 s for 104 ranks without progress" in world.state.incident.message


def test_a_replacement_that_prepares_keeps_a_waiting_job_alive(new_world: NewWorld) -> None:
    world = new_world(workers=2, min_workers=2, wait_s=30.0).open(then=5)
    world.lose(1)
    assert world.state.stage is Stage.WAITING
    for counter in range(4):
        world.pass_time(29.0)
        prepares(world, 2, counter)
    assert world.end is None
    world.pass_time(30.25)
    assert world.end.reason is EndReason.CAPACITY_TIMEOUT


def test_a_worker_that_prepares_on_a_node_with_snapshots_is_waited_for_longer_but_not_without_end(
    new_world: NewWorld,
) -> None:
    world = new_world(workers=1, memory=True, wait_s=300.0).open(then=7)
    world.die(0)
    world.deliver_all()
    orphans_s = world.state.config.timeouts.orphans_s
    assert "snapshots on their nodes" in find_wait(world.state).message
    for counter in range(3):
        world.pass_time(orphans_s - 1.0)
        prepares(world, 1, counter)
        assert "snapshots on their nodes" in find_wait(world.state).message
    world.pass_time(orphans_s - 1.0)
    prepares(world, 1, 3)
    world.pass_time(4.25)
    assert "elasticity.wait_s" in find_wait(world.state).message, "four times orphans_s are over"


def test_the_limits_are_those_of_the_spec() -> None:
    spec = JobSpec.model_validate({"stop": {"steps": 1}, "timeouts": {"start_s": 7.0, "restore_s": 9.0}})
    timeouts = Timeouts().with_spec(spec.timeouts)
    assert (timeouts.start_s, timeouts.restore_s, timeouts.form_s, timeouts.quiesce_s) == (7.0, 9.0, 120.0, 3.0)


def shown(world: Any, **notes: str) -> tuple[float | None, str]:
    readings = Readings()
    for name, note in notes.items():
        progress = Progress(generation=0, phase=Phase.PREPARING, step=0, at=0.0, note=note)
        readings.progress[int(name.removeprefix("w"))] = progress
    status = make_status(world.state, readings, spec_version=1, now=world.now)
    return status.deadline, status.note


def test_the_status_always_says_what_is_waited_for_and_until_when(new_world: NewWorld) -> None:
    world = new_world(workers=2, min_workers=2)
    timeouts, start = world.state.config.timeouts, world.now
    wait_s = world.state.target.spec.checkpoint.wait_s
    note = f"waits for the list of checkpoints in /checkpoints/j1 (checkpoint.wait_s {wait_s:g} s)"
    assert shown(world) == (start + wait_s, note)

    world.open()
    assert shown(world)[1] == "waits for 2 workers, 0 ready (timeouts.start_s 60 s without progress)"
    world.pass_time(5.0)
    prepares(world, 1, 1)
    deadline, note = shown(world, w1="tokenising 45 %")
    assert deadline == world.now + timeouts.start_s
    assert note.startswith("tokenising 45 %; waits for 2 workers, 0 ready")

    world.start_all()
    assert shown(world)[1].startswith("waits for the group to form and to build its model")
    works(world, Phase.RESTORING, 1)
    assert shown(world)[0] == world.now + timeouts.restore_s
    world.join()
    assert shown(world) == (None, "")

    world.run(3)
    world.direct(desired=Desired.PAUSE)
    assert shown(world) == (world.now + timeouts.switch_s, "waits for the group to reach the end of its step (40 s)")
    world.advance()
    assert shown(world) == (world.now + 20.0, "waits for the storage to commit the checkpoint (timeouts.commit_s 20 s)")


def test_a_group_that_quiesces_says_for_whom_it_waits(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=3)
    world.die(2)
    world.deliver_all()
    assert shown(world) == (world.now + 5.0, "waits for the workers to leave the lost group (5 s)")
