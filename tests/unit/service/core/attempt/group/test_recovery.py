"""A worker is lost: the survivors leave their collectives, the group re-forms, and the incident records the cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.messages import KillWorker, StartWorker
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import ExitKind

NewWorld = Callable[..., Any]


def test_an_incident_is_closed_by_the_first_completed_step(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=6)
    world.die(1)
    world.now += 1.5
    world.recover()
    [incident] = world.incidents()
    assert not incident.closed
    world.now += 0.5
    world.run(1)
    [incident] = world.incidents()
    assert incident.closed and incident.cause is IncidentCause.WORKER_DIED
    assert (incident.from_workers, incident.to_workers) == (3, 2)
    assert (incident.ranks, incident.worker_ids) == ((1,), ("shoal/j1/1/worker-1",))
    assert incident.steps_lost == 2, "step 6 was done, the newest checkpoint is of step 4"
    assert incident.state_source == "checkpoint"
    assert incident.recovery_s == pytest.approx(0.5)
    assert world.events("incident.closed")[0]["steps_lost"] == 2
    assert world.state.incident is None and world.state.history.steps_lost == 2


def test_before_the_first_checkpoint_the_group_starts_again_from_the_seed(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=3)
    world.lose(0)
    world.run(1)
    assert world.incidents()[0].state_source == "initial" and world.state.history.steps_lost == 3


def test_survivors_keep_their_ranks_so_that_state_need_not_move(new_world: NewWorld) -> None:
    world = new_world(workers=4, standby=1).open(then=5)
    world.lose(0)
    assert world.state.group.workers == (4, 1, 2, 3), "the spare has taken the dead rank's place"


def test_a_standby_replaces_the_dead_rank_without_a_wait(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=1).open(then=5)
    started = world.count(StartWorker)
    world.lose(1)
    assert world.world_size == 2 and world.state.group.workers == (0, 2)
    assert world.count(StartWorker) == started, "nothing is started while the group re-forms"
    world.run(1)
    assert world.count(StartWorker) == started + 1, "the spare is replaced afterwards"


def test_death_while_a_group_recovers_belongs_to_the_same_incident(new_world: NewWorld) -> None:
    world = new_world(workers=4).open(then=6)
    world.lose(1)
    assert world.state.stage is Stage.RUNNING
    world.lose(2)
    world.run(1)
    [incident] = world.incidents()
    assert incident.closed and incident.ranks == (1,) and len(incident.worker_ids) == 2
    assert (incident.from_workers, incident.to_workers, incident.steps_lost) == (4, 2, 2)
    assert world.state.history.steps_lost == 2, "the same two steps are not counted twice"


def test_a_late_report_of_a_step_does_not_close_the_incident_of_a_second_death(new_world: NewWorld) -> None:
    world = new_world(workers=4).open(then=6)
    world.lose(1)
    world.train(1)  # rank 0 has done a step, and its report is on the way
    world.die(2)
    world.deliver("lost-2")
    world.deliver("reports-0")
    assert world.state.stage is Stage.QUIESCING
    assert world.state.incident is not None and not world.incidents()[0].closed
    world.recover()
    world.run(1)
    assert [i.closed for i in world.incidents()] == [True]


def test_two_simultaneous_deaths_are_one_incident(new_world: NewWorld) -> None:
    world = new_world(workers=4).open(then=5)
    world.die(1, IncidentCause.NODE_DIED)
    world.lose(3, IncidentCause.NODE_DIED)
    world.run(1)
    [incident] = world.incidents()
    assert incident.ranks == (1, 3) and incident.cause is IncidentCause.NODE_DIED
    assert (incident.from_workers, incident.to_workers) == (4, 2)


def test_a_broken_collective_is_blamed_on_a_death_that_is_reported_later(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    world.die(2)
    world.break_collectives()
    world.deliver("exit-0")
    assert world.state.incident.cause is IncidentCause.COLLECTIVE_FAILED
    assert world.state.incident.ranks == ()
    world.deliver("lost-2")
    assert world.state.incident.cause is IncidentCause.WORKER_DIED
    assert world.state.incident.ranks == (2,) and world.state.incident.witness == "run call"
    world.recover()
    world.run(1)
    assert world.incidents()[0].cause is IncidentCause.WORKER_DIED


def test_a_collective_that_broke_without_a_death_is_retried_with_all_workers(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    world.break_collectives()
    world.recover()
    world.run(1)
    assert world.world_size == 3
    assert world.incidents()[0].cause is IncidentCause.COLLECTIVE_FAILED


def test_a_survivor_that_cannot_be_woken_is_killed_and_replaced(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    world.workers[2].is_stuck = True
    world.lose(0)
    assert world.state.stage is Stage.QUIESCING
    world.pass_time(5.1)
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [2]
    assert world.events("worker.lost")[-1]["cause"] == IncidentCause.STUCK
    assert world.state.stage is Stage.FORMING and world.state.group.workers == (1,)
    assert world.state.incident.cause is IncidentCause.WORKER_DIED, "the first cause is kept"
    assert world.state.incident.ranks == (0, 2)


def test_reports_of_an_evicted_worker_are_dropped(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    stuck = world.workers[2]
    stuck.is_stuck = True
    run = stuck.run
    world.lose(0)
    world.pass_time(5.1)
    stuck.run = run
    world.leave(stuck, ExitKind.INTERRUPTED)
    world.deliver("exit-2")
    assert world.state.stage is Stage.FORMING and 2 not in world.state.group.exits


def test_re_formations_that_complete_no_step_back_off(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    waited = []
    for _ in range(6):
        world.break_collectives()
        world.deliver_all()
        if world.state.stage is Stage.WAITING:
            waited.append(world.state.budgets.form_not_before - world.now)
            world.now = world.state.budgets.form_not_before
            world.pass_time(0.0)
        assert world.state.stage is Stage.FORMING
    assert waited == [1.0, 2.0, 4.0, 8.0]
    world.break_collectives()
    world.deliver_all()
    assert world.end.reason is EndReason.RECOVERY_BUDGET
    assert "6 re-formations in a row completed no step" in world.end.message


def test_backing_off_is_not_mistaken_for_a_lack_of_capacity(new_world: NewWorld) -> None:
    world = new_world(workers=2, wait_s=0.5).open(then=5)
    for _ in range(3):
        world.break_collectives()
        world.deliver_all()
    assert world.state.stage is Stage.WAITING
    world.pass_time(0.9)
    assert world.state.stage is Stage.WAITING, "both workers are there"
    world.pass_time(0.2)
    assert world.state.stage is Stage.FORMING


def test_a_completed_step_forgives_fruitless_re_formations(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=1)
    for _ in range(8):
        world.break_collectives()
        world.recover()
        world.run(1)
    assert world.state.stage is Stage.RUNNING and world.state.budgets.recoveries == 8


def test_a_step_that_is_done_again_forgives_no_fruitless_re_formation(new_world: NewWorld) -> None:
    """Without snapshots each group begins at the seed; a group that never gets beyond step 1 makes no progress."""
    world = new_world(workers=2).open(then=1)
    for _ in range(3):
        world.break_collectives()
        world.deliver_all()
        world.now = max(world.now, world.state.budgets.form_not_before)
        world.pass_time(0.0)
        world.join()
        world.run(1)
    assert world.state.progress.step == 1 and world.state.budgets.fruitless == 3
    world.run(1)
    assert world.state.progress.step == 2 and world.state.budgets.fruitless == 0


def break_and_recover(world: Any) -> None:
    world.break_collectives()
    world.deliver_all()
    world.until(Stage.RUNNING, Stage.ENDED)


def trained(new_world: NewWorld, steps: int) -> Any:
    """A group of two whose state is in memory only."""
    world = new_world(workers=2, memory=True, stop={"steps": 1000})
    world.total_steps = 1000
    world.open()
    world.start_all()
    world.join()
    train(world, steps)
    return world


def train(world: Any, steps: int) -> None:
    for _ in range(steps):
        world.train(1, save_every=1000)
        world.deliver_all()


def lose_everything(world: Any) -> None:
    for node in list(world.memory):
        world.die_node(node)
    world.deliver_all()
    world.until(Stage.RUNNING, Stage.ENDED)


def test_a_job_that_was_thrown_back_and_advances_again_makes_progress(new_world: NewWorld) -> None:
    """Back at the seed, with all that was beyond it lost: each break costs nothing, and the job trains on."""
    world = trained(new_world, 40)
    lose_everything(world)
    assert world.state.group.start_step == 0 and world.state.progress.furthest_step == 40
    for number in range(9):
        train(world, 3)
        break_and_recover(world)
        assert world.state.stage is Stage.RUNNING, f"break {number}: {world.end}"
    assert world.state.group.start_step == 27 < world.state.progress.furthest_step


def test_a_job_that_goes_back_and_forth_ends(new_world: NewWorld) -> None:
    """Its snapshots bring it forth to step 2 each time, and their loss back to the seed; step 6 is never completed."""
    world = trained(new_world, 5)
    for _ in range(20):
        lose_everything(world)
        if world.state.stage is Stage.ENDED:
            break
        train(world, 2)
        break_and_recover(world)
    assert world.end is not None and world.end.reason is EndReason.RECOVERY_BUDGET
    assert "no step after 5 is completed" in world.end.message


def test_the_recovery_budget_ends_the_attempt(new_world: NewWorld) -> None:
    world = new_world(workers=2, retry={"max_recoveries": 2}).open(then=1)
    for _ in range(2):
        world.break_collectives()
        world.recover()
        world.run(1)
    world.break_collectives()
    world.deliver_all()
    assert world.end.reason is EndReason.RECOVERY_BUDGET
    assert "retry.max_recoveries is 2" in world.end.message and "connection reset" in world.end.message


def test_the_recoveries_of_the_day_before_are_forgiven(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True, retry={"max_recoveries": 2}).open(then=1)
    for pause_s in (50_000.0, 50_000.0, 50_000.0, 86_400.0, 0.0, 0.0):
        world.break_collectives()
        world.recover()
        world.run(1)
        world.now += pause_s
    assert world.end is None
    world.break_collectives()
    world.deliver_all()
    assert world.end is not None and "recovered 2 times within a day" in world.end.message


def test_a_lost_spare_opens_no_incident(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=1).open(then=5)
    world.die(2)
    world.deliver_all()
    assert world.state.stage is Stage.RUNNING and world.incidents() == []
    assert world.events("worker.lost")[0]["rank"] is None
    assert world.count(StartWorker) == 4


def test_forming_reports_that_arrive_after_the_first_leave_count(new_world: NewWorld) -> None:
    """The last step ends while the report is in transit: there are two channels, and the other one was faster."""
    world = new_world(workers=2).open(then=11)
    world.die(1)
    world.quiesce()
    world.form()
    while world.group():
        world.train(1)
    world.deliver("exit-0")
    assert world.state.stage is Stage.COMMITTING and world.state.progress.step == 12
    world.deliver_all()
    world.finish_storage()
    assert world.end.reason is EndReason.FINISHED and world.end.step == 12
    [incident] = world.incidents()
    assert incident.closed and incident.steps_lost == 3
