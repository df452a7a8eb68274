"""The server is about to end the cluster: an attempt saves and ends like a paused one, and its job stays wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.desired import Desired
from shoal_service.supervisor.reporting.status import Readings, job_state, make_status
from shoal_workers.contract.job import EndReason, JobState

NewWorld = Callable[..., Any]


def test_a_running_group_saves_the_step_under_way(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=5)
    world.direct(server_stops=True)
    assert world.state.stage is Stage.SWITCHING and world.state.current.durable
    assert job_state(world.state) is JobState.PAUSING
    world.run(1)
    assert world.end.reason is EndReason.SERVER_STOPPED and world.end.message == "saved at step 6."
    assert world.state.checkpoints.newest == "step-000000000006-a1-g1" and world.end.step == 6


def test_a_group_that_re_forms_saves_what_its_memory_holds(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    world.die(1)
    world.deliver_all()
    world.direct(server_stops=True)
    world.recover()
    world.run(1)
    assert world.end.reason is EndReason.SERVER_STOPPED and world.state.checkpoints.durable_step == world.end.step == 6


def test_an_attempt_without_a_group_ends_at_once_and_names_what_is_saved(new_world: NewWorld) -> None:
    world = new_world(workers=2, min_workers=2).open(then=5)
    world.lose(1)
    assert world.state.stage is Stage.WAITING
    world.direct(server_stops=True)
    assert world.end.reason is EndReason.SERVER_STOPPED and world.end.message == "saved at step 4 of 5."


def test_a_pause_remains_a_pause_and_a_cancel_a_cancel(new_world: NewWorld) -> None:
    for desired, reason in ((Desired.PAUSE, EndReason.PAUSED), (Desired.CANCEL, EndReason.CANCELLED)):
        world = new_world(workers=2).open(then=5)
        world.direct(server_stops=True)
        world.direct(desired=desired)
        if desired is Desired.PAUSE:
            world.run(1)
        assert world.end.reason is reason


def test_training_goes_on_under_a_server_that_keeps_the_cluster(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    world.direct(server_stops=True)
    world.direct(server_stops=False)
    world.run(1)
    world.join()
    assert world.state.stage is Stage.RUNNING and world.state.progress.step == 6


def test_a_preempted_attempt_saves_the_step_under_way_and_ends(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=5)
    world.direct(is_preempted=True)
    assert world.state.stage is Stage.SWITCHING and world.state.current.durable
    world.run(1)
    assert world.end.reason is EndReason.PREEMPTED and world.end.message == "saved at step 6."

    assert world.state.checkpoints.durable_step == world.end.step == 6


@pytest.mark.parametrize("steps", [None, 0, 5])
def test_a_preempted_attempt_is_shown_as_pausing_for_that_reason_until_its_end(
    new_world: NewWorld, steps: int | None
) -> None:
    world = new_world(workers=2, memory=True).open(then=steps)
    seen = []

    def look() -> None:
        status = make_status(world.state, Readings(), spec_version=1, now=0.0)
        seen.append((status.state, status.reason, "returns to the queue" in status.message))

    world.direct(is_preempted=True)
    look()
    while world.end is None:
        world.train(1)
        look()
        world.deliver_all()
        look()
        world.answer_storage()
        look()
    assert world.state.stage is Stage.ENDED
    assert set(seen) == {(JobState.PAUSING, "preempted", True)}
    if steps is None:
        assert world.end.message == "it had not begun to train."


def test_a_preempted_attempt_that_may_keep_its_workers_trains_on(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    world.direct(is_preempted=True)
    world.direct(is_preempted=False)
    world.run(1)
    world.join()
    assert world.state.stage is Stage.RUNNING and world.state.progress.step == 6


def test_a_move_is_said_as_one(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    world.direct(is_preempted=True, moves_to="west")
    assert world.end.reason is EndReason.MOVED and world.end.message == "it had not begun to train."


def test_an_attempt_that_trains_says_where_it_moves_until_it_has_saved(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=5)
    world.direct(is_preempted=True, moves_to="west")
    status = make_status(world.state, Readings(), spec_version=1, now=0.0)
    assert (status.state, status.reason) == (JobState.PAUSING, "moved")
    assert status.message.startswith("The job moves to the cluster west: ")
    [switching] = world.events("generation.switching")
    assert switching["reason"] == "it moves to the cluster west"
    world.run(1)
    assert world.end.reason is EndReason.MOVED and world.end.message == "saved at step 6."
