"""Which checkpoint is restored and which is committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal_service.core.attempt.checkpoints import describe_search
from shoal_service.core.attempt.machine import step
from shoal_service.core.attempt.messages import (
    CheckpointFound,
    Commit,
    FindCheckpoint,
    ForgetDamaged,
    ReportArrived,
    RequestSnapshotParts,
    Run,
    SnapshotPartsReported,
    StartWorker,
    WorkerWarm,
)
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.planner import plan
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase
from shoal_workers.contract.worker_reports import SavedPart

NewWorld = Callable[..., Any]
OLD, NEW = "step-000000000004-a0-g1", "step-000000000008-a0-g1"


def test_a_commit_needs_the_parts_of_every_rank(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=3)
    world.train(1)
    world.deliver("reports-0")
    world.deliver("reports-0")
    world.deliver("reports-1")
    assert world.count(Commit) == 0
    world.deliver("reports-2")
    assert [c.name for c in world.commands if isinstance(c, Commit)] == ["step-000000000004-a1-g1"]


def test_a_part_that_is_reported_twice_commits_once(new_world: NewWorld) -> None:
    """A restarted supervisor receives the unacknowledged reports again."""
    world = new_world(workers=2).open(then=4)
    again = [e for e in world.history if isinstance(e, ReportArrived) and isinstance(e.item, SavedPart)]
    assert len(again) == 2
    for event in again:
        assert world.feed(event) == ()
    assert world.state.checkpoints.parts == {}


def test_a_save_that_fails_on_one_rank_is_not_committed(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=3)
    for worker in world.group():
        worker.step = 4
    first, second = world.group()
    world.fail_save(second)
    world.deliver_all()
    world.save()
    world.deliver_all()
    assert world.count(Commit) == 0 and world.state.checkpoints.parts == {}
    assert len(world.events("checkpoint.failed")) == 1
    assert world.state.stage is Stage.RUNNING and first.alive


def test_a_commit_that_fails_leaves_the_one_before_it_the_newest(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=7)
    world.advance()
    world.finish_storage(ok=False)
    assert world.state.checkpoints.newest == "step-000000000004-a1-g1" and world.state.stage is Stage.RUNNING


def test_a_damaged_checkpoint_is_left_for_the_one_before_it(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    world.committed = {OLD: True, NEW: False}
    world.open()
    world.start_all()
    world.join()
    assert world.state.stage is Stage.FALLING_BACK
    assert ForgetDamaged(NEW, "flipped byte") in world.commands
    assert world.finds == [FindCheckpoint(excluding=(NEW,), expected=NEW)]
    world.finish_storage()
    world.join()
    world.run(1)
    assert world.state.progress.step == 5
    assert world.events("checkpoint.damaged")[0]["name"] == NEW
    assert world.events("checkpoint.fallback") == [{"to": OLD}]
    assert world.incidents()[0].cause is IncidentCause.DAMAGED_CHECKPOINT and world.incidents()[0].closed


def test_a_worker_that_becomes_warm_meanwhile_is_asked_for_its_snapshots_before_the_group_forms(
    new_world: NewWorld,
) -> None:
    """It may serve a newer snapshot than the checkpoint before the damaged one."""
    world = new_world(workers=2, memory=True)
    world.committed = {OLD: True, NEW: False}
    world.open()
    world.start_all()
    world.join()
    assert world.state.stage is Stage.FALLING_BACK
    index = world.state.pool.next_index
    late = replace(world.state.pool.workers[0], index=index, worker_id="late", info=None, warm_at=None)
    world.state = replace(world.state, pool=world.state.pool.with_new(late))
    info = world.state.pool.workers[0].info
    state, commands = step(world.state, WorkerWarm(index, info), world.now, plan)
    assert RequestSnapshotParts(index) in commands
    found = CheckpointFound(OLD)
    state, commands = step(state, found, world.now, plan)
    assert state.stage is Stage.WAITING and not any(isinstance(command, Run) for command in commands)
    state, commands = step(state, SnapshotPartsReported(index, ()), world.now, plan)
    assert state.stage is Stage.FORMING and any(isinstance(command, Run) for command in commands)


def test_the_only_checkpoint_being_damaged_ends_the_job_and_names_it(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    world.committed = {OLD: False}
    world.open()
    world.start_all()
    world.join()
    world.finish_storage()
    assert world.end.reason is EndReason.DAMAGED_CHECKPOINT
    assert OLD in world.end.message and "checkpoint.all_damaged" in world.end.message
    assert world.events("checkpoint.fallback") == []


def test_with_leave_a_job_without_any_good_checkpoint_starts_over(new_world: NewWorld) -> None:
    world = new_world(workers=2, checkpoint={"all_damaged": "start_over"})
    world.committed = {OLD: False}
    world.open()
    world.start_all()
    world.until(Stage.RUNNING)
    world.run(1)
    assert world.state.progress.step == 1 and world.state.group.restored is None
    assert world.events("checkpoint.fallback") == [{"to": None}]


def test_a_damaged_only_marker_ends_the_job_instead_of_restarting_at_step_0(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    world.committed = {NEW: False}
    world.feed(CheckpointFound(None, ((NEW, "COMMIT.json has another crc32"),)))
    assert world.end.reason is EndReason.DAMAGED_CHECKPOINT and NEW in world.end.message
    assert world.events("checkpoint.damaged") == [{"name": NEW, "message": "COMMIT.json has another crc32"}]
    assert ForgetDamaged(NEW, "COMMIT.json has another crc32") in world.commands
    assert world.count(StartWorker) == 0


def test_a_directory_without_what_was_committed_is_waited_for_and_never_step_0(new_world: NewWorld) -> None:
    world = new_world(workers=2, expected=NEW, checkpoint={"wait_s": 20.0})
    assert world.finds == [FindCheckpoint(expected=NEW)]
    world.committed = {OLD: True, NEW: True}
    world.is_storage_empty = True
    world.finish_storage()
    assert world.state.stage is Stage.OPENING and world.count(StartWorker) == 0
    assert "it has no checkpoint, and the job has committed step-000000000008-a0-g1" in describe_search(world.state)
    world.pass_time(1.0)
    world.is_storage_empty = False
    world.answer_storage()
    world.start_all()
    world.until(Stage.RUNNING)
    assert world.state.group.restored == NEW


def test_checkpoints_that_stay_away_end_the_attempt_with_a_reason_of_their_own(new_world: NewWorld) -> None:
    world = new_world(workers=2, expected=NEW, checkpoint={"wait_s": 20.0})
    world.committed = {OLD: True}
    for _ in range(30):
        world.finish_storage()
        world.pass_time(1.0)
    assert world.end.reason is EndReason.CHECKPOINTS_MISSING and world.count(StartWorker) == 0
    assert f"its newest checkpoint is {OLD}, and the job has committed {NEW}" in world.end.message
    assert "shoal take JOB STEP" in world.end.message


def test_a_newer_checkpoint_than_the_known_one_is_enough_whether_it_is_good_or_not(new_world: NewWorld) -> None:
    newest = "step-000000000009-a0-g1"
    for there, restored in (({newest: True}, newest), ({OLD: True, newest: False}, OLD)):
        world = new_world(workers=2, expected=NEW)
        world.committed = there
        world.open()
        world.start_all()
        world.until(Stage.RUNNING)
        assert world.state.group.restored == restored


def test_a_directory_that_goes_away_while_the_attempt_runs_is_waited_for_too(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    world.committed = {OLD: True, NEW: False}
    world.open()
    world.start_all()
    world.join()
    assert world.state.stage is Stage.FALLING_BACK
    world.is_storage_empty = True
    world.finish_storage()
    assert world.state.stage is Stage.FALLING_BACK and world.events("checkpoint.fallback") == []
    world.is_storage_empty = False
    world.pass_time(1.0)
    world.finish_storage()
    assert world.state.group.restored == OLD


def test_a_damaged_newest_marker_is_an_event_and_the_one_before_it_is_used(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    world.committed = {OLD: True, NEW: False}
    world.feed(CheckpointFound(OLD, ((NEW, "COMMIT.json has another crc32"),)))
    assert world.events("checkpoint.fallback") == [{"to": OLD}]
    assert world.state.checkpoints.damaged == (NEW,) and world.state.stage is Stage.STARTING


def test_the_damaged_one_is_the_one_that_was_read_not_the_newest_by_then(new_world: NewWorld) -> None:
    """A commit of the generation before may be answered while the next one is already reading an older checkpoint."""
    world = new_world(workers=2).open(then=7)
    world.advance()
    [commit] = world.commits
    world.die(1)
    world.quiesce()
    assert world.state.stage is Stage.FORMING and world.state.group.restored == "step-000000000004-a1-g1"
    world.damage_newest()
    world.finish_storage()
    assert world.state.checkpoints.newest == commit.name
    world.join()
    assert world.state.checkpoints.damaged == ("step-000000000004-a1-g1",)
    world.finish_storage()
    assert world.state.group.restored == commit.name


def test_a_commit_during_the_search_for_an_older_one_is_not_forgotten(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=7)
    world.advance()
    commits, world.commits = world.commits, []
    world.lose(1)
    world.damage_newest()
    world.break_collectives()
    world.recover()
    world.deliver_all()
    assert world.state.stage is Stage.FALLING_BACK
    world.answer_storage()  # the search has already looked at the storage
    world.commits = commits
    world.answer_storage()
    world.deliver("commit")
    world.deliver("find")
    assert world.state.group.restored == commits[0].name


def test_an_answer_to_an_abandoned_search_is_dropped(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    before = world.state
    world.feed(CheckpointFound(None))
    assert world.state == before


def test_a_late_commit_of_an_older_generation_is_restored_from_next_time(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=7)
    world.advance()
    world.lose(2)
    assert world.state.progress.step == 4
    world.finish_storage()
    world.lose(1)
    runs = [c.assignment for c in world.commands if isinstance(c, Run)]
    assert runs[-1].restore_from.endswith("step-000000000008-a1-g1")
    assert world.state.progress.step == 8


def test_storage_that_a_rank_cannot_read_is_waited_for_without_a_word_of_damage(new_world: NewWorld) -> None:
    """The supervisor sees the checkpoint; the mount of a worker's node is missing."""
    world = new_world(workers=2, checkpoint={"wait_s": 100.0}, retry={"max_recoveries": 0})
    world.committed = {OLD: True, NEW: True}
    world.open()
    world.start_all()
    for _ in range(6):
        _fail_to_read(world)
        assert world.state.stage is Stage.FALLING_BACK and "no mount" in describe_search(world.state)
        world.now += 15.0
        world.pass_time(0.0)
        world.answer_storage()
        world.deliver_all()
    world.form()
    world.deliver_all()
    world.run(1)
    assert world.state.progress.step == 9 and world.state.checkpoints.unreadable_since is None
    assert len(world.events("checkpoint.storage_away")) == 1 and world.events("checkpoint.fallback") == []
    assert world.events("checkpoint.damaged") == world.events("checkpoint.failed") == []


def test_storage_that_a_rank_cannot_read_for_long_ends_the_attempt_with_the_reason(new_world: NewWorld) -> None:
    world = new_world(workers=2, checkpoint={"wait_s": 100.0, "all_damaged": "start_over"})
    world.committed = {OLD: True}
    world.open()
    world.start_all()
    while world.end is None:
        if world.state.stage is Stage.FORMING:
            _fail_to_read(world)
        world.now += 10.0
        world.pass_time(0.0)
        world.answer_storage()
        world.deliver_all()
    assert world.end.reason is EndReason.STORAGE_FAILED and "no mount" in world.end.message
    assert "(checkpoint.wait_s is 100)" in world.end.message


def _fail_to_read(world: Any) -> None:
    error = ErrorReport(type="OSError", message="no mount", traceback="...", phase=Phase.RESTORING)
    world.leave(world.group()[1], ExitKind.STORAGE_FAILED, error)
    world.break_collectives()
    world.deliver_all()
