"""Planned changes happen at a step boundary, with the checkpoint of that step, and lose no step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.messages import Commit, KillWorker, RequestYield, Run
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.desired import Desired
from shoal_service.supervisor.reporting.status import job_state
from shoal_workers.contract.job import EndReason, IncidentCause, JobState

NewWorld = Callable[..., Any]


def grown(world: Any) -> Any:
    """A running group of two with a third, warm worker, which received a yield because of it."""
    world.direct(granted=3)
    world.pass_time(0.25)
    world.start_all()
    assert world.state.stage is Stage.SWITCHING
    return world


def test_a_group_grows_without_losing_a_step(new_world: NewWorld) -> None:
    world = grown(new_world(workers=2).open(then=5))
    assert world.events("generation.switching")[0]["reason"] == "grow 2 -> 3"
    world.run(1)
    assert world.state.stage is Stage.FORMING and world.world_size == 3
    assert world.state.group.restored == "step-000000000006-a1-g1"
    world.join()
    world.run(1)
    assert world.state.progress.step == 7 and world.num_steps == 7
    assert world.state.history.steps_lost == 0 and world.incidents() == []


def test_a_group_does_not_grow_while_another_newcomer_may_settle(new_world: NewWorld) -> None:
    world = new_world(workers=1).open(then=1)
    world.direct(granted=3)
    world.start(1)
    world.deliver_all()
    assert world.state.stage is Stage.RUNNING, "worker 2 is still starting"
    world.start(2)
    world.deliver_all()
    assert world.state.stage is Stage.SWITCHING
    assert world.events("generation.switching")[0]["reason"] == "grow 1 -> 3"


def test_the_wait_for_a_new_worker_is_bounded(new_world: NewWorld) -> None:
    world = new_world(workers=1).open(then=1)
    world.direct(granted=3)
    world.start(1)
    world.deliver_all()
    world.pass_time(3.0)
    assert world.events("generation.switching")[0]["reason"] == "grow 1 -> 2"


def test_a_smaller_grant_shrinks_the_group_and_releases_the_rest(new_world: NewWorld) -> None:
    world = new_world(workers=4).open(then=5)
    world.direct(granted=2)
    assert world.state.stage is Stage.SWITCHING
    world.run(1)
    world.join()
    assert world.state.group.workers == (0, 1) and world.state.history.steps_lost == 0
    assert sorted(c.index for c in world.commands if isinstance(c, KillWorker)) == [2, 3]
    assert len(world.events("worker.released")) == 2


def test_a_grant_below_min_workers_waits_for_a_better_one(new_world: NewWorld) -> None:
    world = new_world(workers=3, min_workers=2).open(then=5)
    world.direct(granted=1)
    world.run(1)
    assert world.state.stage is Stage.WAITING
    world.direct(granted=2)
    world.start_all()
    world.until(Stage.RUNNING)
    assert world.world_size == 2 and world.state.history.steps_lost == 0


def test_death_on_the_way_to_the_boundary_is_an_ordinary_incident(new_world: NewWorld) -> None:
    world = grown(new_world(workers=2).open(then=6))
    world.lose(1)
    world.run(1)
    assert world.state.stage is Stage.RUNNING and world.state.group.workers == (0, 2)
    [incident] = world.incidents()
    assert incident.cause is IncidentCause.WORKER_DIED and incident.steps_lost == 2


def test_death_after_only_some_have_yielded(new_world: NewWorld) -> None:
    world = grown(new_world(workers=2).open(then=6))
    world.train(1)
    world.deliver("exit-0")
    world.lose(1)
    world.run(1)
    assert world.state.stage is Stage.RUNNING and world.incidents()[0].steps_lost == 3


def test_a_new_worker_that_dies_during_the_switch_costs_no_step(new_world: NewWorld) -> None:
    world = grown(new_world(workers=2).open(then=6))
    world.die(2)
    world.run(1)
    assert world.state.stage is Stage.FORMING and world.state.group.workers == (0, 1)
    world.join()
    assert world.state.progress.step == 7 and world.incidents() == []


def test_a_death_during_the_commit_loses_no_step(new_world: NewWorld) -> None:
    world = grown(new_world(workers=2).open(then=5))
    world.advance()
    assert world.state.stage is Stage.COMMITTING and world.commits
    world.die(1)
    world.deliver_all()
    world.finish_storage()
    assert world.state.stage is Stage.FORMING and world.state.group.workers == (0, 2)
    assert world.state.group.restored == "step-000000000006-a1-g1" and world.incidents() == []


def test_a_worker_that_dies_before_reporting_its_part_makes_the_group_roll_back(new_world: NewWorld) -> None:
    """It has left `run`, but its files will never be reported, so the commit cannot be awaited."""
    world = grown(new_world(workers=2).open(then=6))
    world.train(1)
    world.deliver("exit-0")
    world.deliver("exit-1")
    assert world.state.stage is Stage.COMMITTING
    world.deliver("reports-0")
    world.deliver("reports-0")
    world.die(1)
    world.deliver_all()
    assert world.state.stage is Stage.FORMING and world.state.group.restored == "step-000000000004-a1-g1"
    world.join()
    world.run(1)
    [incident] = world.incidents()
    assert incident.closed and incident.ranks == (1,) and incident.steps_lost == 3


def test_a_worker_that_dies_before_reporting_its_part_of_the_result_does_not_fail_the_job(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=11)
    world.train(1)
    world.deliver("exit-1")
    assert world.state.stage is Stage.SWITCHING
    world.die(1)
    world.deliver("lost-1")
    assert world.state.incident is not None
    world.deliver_all()
    assert world.state.stage is Stage.FORMING
    world.join()
    world.run(4)
    assert world.end.reason is EndReason.FINISHED and world.end.step == 12


def test_a_switch_whose_commit_fails_continues_from_the_previous_checkpoint(new_world: NewWorld) -> None:
    world = grown(new_world(workers=2).open(then=6))
    world.advance()
    world.finish_storage(ok=False)
    assert world.events("generation.switch_lossy")[0]["restore"] == "step-000000000004-a1-g1"
    assert world.state.stage is Stage.FORMING and world.world_size == 3
    world.join()
    assert world.state.history.steps_lost == 3, "steps that are done again are counted"


def test_a_switch_whose_commit_hangs_continues_after_the_deadline(new_world: NewWorld) -> None:
    world = grown(new_world(workers=2).open(then=6))
    world.advance()
    world.pass_time(20.1)
    assert world.state.stage is Stage.FORMING and world.state.group.restored == "step-000000000004-a1-g1"


def test_a_save_that_failed_puts_the_next_growth_off(new_world: NewWorld) -> None:
    world = grown(new_world(workers=2).open(then=5))
    world.advance()
    world.finish_storage(ok=False)
    world.join()
    world.direct(granted=4)
    world.start_all()
    assert world.state.stage is Stage.RUNNING
    world.pass_time(61.0)
    assert world.state.stage is Stage.SWITCHING


def test_a_boundary_that_is_never_reached_breaks_the_group_up(new_world: NewWorld) -> None:
    world = grown(new_world(workers=2).open(then=5))
    world.pass_time(40.1)
    assert world.state.stage is Stage.QUIESCING
    world.recover()
    assert world.state.stage is Stage.RUNNING and world.world_size == 3


def test_the_wait_for_a_rank_that_does_not_leave_the_last_step_is_bounded(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=11)
    world.train(1)
    world.deliver("exit-0")
    world.pending.pop("exit-1")
    world.workers[1].run = world.workers[1].run or _last_run(world, 1)
    world.workers[1].is_stuck = True
    assert world.state.stage is Stage.SWITCHING
    world.pass_time(40.1)
    world.pass_time(5.1)
    assert world.state.stage is Stage.FORMING and world.state.group.workers == (0,)


def _last_run(world: Any, index: int) -> Any:
    return [c.assignment for c in world.commands if isinstance(c, Run) and c.index == index][-1]


def test_ranks_that_have_left_receive_no_yield(new_world: NewWorld) -> None:
    """The first rank has finished and the grant shrinks before the other ranks report; they are about to finish."""
    world = new_world(workers=3).open(then=11)
    world.train(1)
    world.deliver("exit-0")
    world.direct(granted=1)
    assert world.count(RequestYield) == 0
    world.deliver_all()
    world.finish_storage()
    assert world.end.reason is EndReason.FINISHED


def test_a_finished_rank_is_not_released_before_its_part_is_reported(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=1).open(then=5)
    world.lose(0)
    world.run(1)
    world.start_all()
    assert world.state.group.workers == (2, 1)
    world.run(5)
    while world.group() and world.group()[0].step < 12:
        world.train(1)
    last = world.state.group.workers[-1]
    world.deliver(f"exit-{last}")
    world.direct(granted=2)
    world.deliver_all()
    world.finish_storage()
    assert world.end.reason is EndReason.FINISHED


@pytest.mark.parametrize("stage", [Stage.OPENING, Stage.STARTING, Stage.WAITING, Stage.FALLING_BACK])
def test_a_pause_without_a_group_ends_the_attempt_immediately(new_world: NewWorld, stage: Stage) -> None:
    world = new_world(workers=2, min_workers=2)
    if stage is Stage.STARTING:
        world.open()
    if stage is Stage.WAITING:
        world.open(then=5)
        world.die(1)
        world.quiesce()
    if stage is Stage.FALLING_BACK:
        world.committed["step-000000000004-a0-g1"] = False
        world.open()
        world.start_all()
        world.join()
    assert world.state.stage is stage
    world.direct(desired=Desired.PAUSE)
    assert world.end.reason is EndReason.PAUSED


def test_a_pause_of_a_running_group_loses_no_step(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    world.direct(desired=Desired.PAUSE)
    assert world.state.stage is Stage.SWITCHING and job_state(world.state) is JobState.PAUSING
    world.run(1)
    assert world.end.reason is EndReason.PAUSED
    assert world.state.checkpoints.newest == "step-000000000006-a1-g1" and world.end.step == 6


def test_a_pause_while_the_group_forms_waits_for_its_first_boundary(new_world: NewWorld) -> None:
    world = new_world(workers=2).open()
    world.start_all()
    world.direct(desired=Desired.PAUSE)
    assert world.state.stage is Stage.FORMING
    world.join()
    assert world.state.stage is Stage.SWITCHING
    world.run(1)
    assert world.end.reason is EndReason.PAUSED and world.state.checkpoints.newest is not None


def test_a_pause_while_survivors_are_woken_ends_once_they_are(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    world.die(1)
    world.deliver_all()
    world.direct(desired=Desired.PAUSE)
    assert world.state.stage is Stage.QUIESCING
    world.obey_interrupts()
    world.deliver_all()
    assert world.end.reason is EndReason.PAUSED


def test_a_pause_while_the_commit_is_in_flight_waits_for_it(new_world: NewWorld) -> None:
    world = grown(new_world(workers=2).open(then=5))
    world.advance()
    world.direct(desired=Desired.PAUSE)
    assert world.state.stage is Stage.COMMITTING
    world.finish_storage()
    assert world.end.reason is EndReason.PAUSED and world.state.checkpoints.newest == "step-000000000006-a1-g1"


def test_after_an_undone_pause_training_continues(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    world.direct(desired=Desired.PAUSE)
    world.direct(desired=Desired.RUN)
    world.run(1)
    assert world.state.stage is Stage.FORMING
    world.join()
    assert world.state.progress.step == 6 and world.state.history.steps_lost == 0


def test_a_pause_in_the_last_step_finishes_instead(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=11)
    world.direct(desired=Desired.PAUSE)
    world.run(1)
    assert world.end.reason is EndReason.FINISHED


@pytest.mark.parametrize("steps", [None, 0, 5])
def test_a_cancel_kills_all_workers_immediately(new_world: NewWorld, steps: int | None) -> None:
    world = new_world(workers=3).open(then=steps)
    world.direct(desired=Desired.CANCEL)
    assert world.end.reason is EndReason.CANCELLED
    assert world.count(KillWorker) == 3


def test_finishing_waits_for_the_commit_of_the_last_step(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=11)
    world.advance()
    assert world.state.stage is Stage.COMMITTING and job_state(world.state) is JobState.RUNNING
    assert isinstance(world.commits[0], Commit)
    world.finish_storage()
    assert world.end.reason is EndReason.FINISHED and world.end.message == "finished after 12 steps"
