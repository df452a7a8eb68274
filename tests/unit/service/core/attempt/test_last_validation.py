"""All steps are done: the checkpoint is committed before the final validation, so a death there costs no step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_service.core.attempt.messages import Commit, NoteCommit, ReportArrived, StartWorker, unanswered
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SavedPart, ValidationReport

NewWorld = Callable[..., Any]


def at_the_last_step(new_world: NewWorld, *, workers: int = 1, nodes: int | None = None) -> Any:
    """All steps are done and every rank has saved its part; the group waits for the commit, then validates."""
    world = new_world(workers=workers, memory=True, nodes=nodes).open(then=0)
    while world.state.progress.step < world.total_steps:
        world.report(*(1.0,) * workers)
    world.save()
    world.deliver_all()
    return world


def form_again(world: Any) -> None:
    world.start_all()
    world.now = max(world.now, world.state.budgets.form_not_before)
    world.pass_time(0.0)
    world.join()


def test_the_workers_are_notified_once_the_last_checkpoint_is_committed(new_world: NewWorld) -> None:
    world = at_the_last_step(new_world, workers=2)
    assert world.group()[0].run.commit_timeout_s == world.state.config.timeouts.commit_s > 0
    assert world.count(NoteCommit) == 0
    world.finish_storage()
    noted = [c for c in world.commands if isinstance(c, NoteCommit)]
    assert noted == [NoteCommit(0, 1, 12), NoteCommit(1, 1, 12)]
    unsent = unanswered(dict(enumerate(noted)), world.state)
    assert len(unsent) == len(noted), "a supervisor that died may not have sent them"


def test_they_receive_why_it_could_not_be_committed(new_world: NewWorld) -> None:
    world = at_the_last_step(new_world)
    world.finish_storage(ok=False)
    assert [c.error for c in world.commands if isinstance(c, NoteCommit)] == ["disk full"]


def test_no_commit_of_another_step_is_noted(new_world: NewWorld) -> None:
    assert new_world(workers=2, memory=True).open(then=8).count(NoteCommit) == 0


def test_a_final_validation_that_is_always_lost_ends_with_its_own_reason(new_world: NewWorld) -> None:
    world = at_the_last_step(new_world)
    world.finish_storage()
    for _ in range(2):
        world.die(max(world.workers))
        world.deliver_all()
        assert world.end is None
        form_again(world)
        assert world.state.group.start_step == world.total_steps, "no step is done again"
    world.die(max(world.workers))
    world.deliver_all()
    assert world.end.reason is EndReason.VALIDATION_FAILED
    assert "step-000000000012-a1-g1 committed" in world.end.message
    assert world.state.history.steps_lost == 0


def test_without_a_checkpoint_the_state_after_the_last_step_is_worth_more_tries(new_world: NewWorld) -> None:
    world = at_the_last_step(new_world)
    for _ in range(3):
        world.die(max(world.workers))
        world.deliver_all()
        form_again(world)
    assert world.end is None and world.state.stage is Stage.RUNNING


def test_an_incident_during_the_final_validation_closes_with_its_report(new_world: NewWorld) -> None:
    world = at_the_last_step(new_world)
    world.finish_storage()
    world.die(0)
    world.deliver_all()
    form_again(world)
    assert not world.incidents()[0].closed
    group = world.group()
    world.feed(
        ReportArrived(
            group[0].index,
            ValidationReport(generation=2, step=12, at=world.now, loss=1.0, bits_per_byte=None, samples=4),
        )
    )
    [incident] = world.incidents()
    assert incident.closed and incident.steps_lost == 0


def test_an_incident_of_a_group_that_only_saves_again_closes_at_the_end(new_world: NewWorld) -> None:
    world = at_the_last_step(new_world)
    world.die(0)
    world.deliver_all()
    form_again(world)
    world.advance()
    world.finish_storage()
    assert world.end.reason is EndReason.FINISHED
    assert [incident.closed for incident in world.incidents()] == [True]


def test_an_exit_carries_the_part_whose_report_dies_with_the_worker(new_world: NewWorld) -> None:
    """The process ends between its exit and the next poll."""
    world = new_world(workers=1, memory=True).open(then=11)
    world.train(1)
    reports = [event.item for event in world.pending.pop("reports-0") if isinstance(event, ReportArrived)]
    [part] = [item for item in reports if isinstance(item, SavedPart)]
    [left] = world.pending.pop("exit-0")
    world.feed(type(left)(0, left.exit.model_copy(update={"saved_part": part})))
    world.die(0)
    world.deliver_all()
    assert world.count(Commit) == 3 and world.state.stage is Stage.COMMITTING
    world.finish_storage()
    assert world.end.reason is EndReason.FINISHED


def test_a_worker_that_dies_before_its_part_is_known_is_replaced_on_its_own_node(new_world: NewWorld) -> None:
    """Only there can its snapshot be read: on another node the job would begin again at the seed."""
    world = new_world(workers=1, memory=True, nodes=3).open(then=11)
    world.committed.clear()
    world.train(1)
    world.pending.pop("reports-0")
    [left] = world.pending.pop("exit-0")
    assert left.exit.kind is ExitKind.FINISHED
    world.feed(left)
    world.die(0)
    world.deliver_all()
    [start] = [c for c in world.commands if isinstance(c, StartWorker) and c.index == 1]
    assert start.only_on == "n0"
