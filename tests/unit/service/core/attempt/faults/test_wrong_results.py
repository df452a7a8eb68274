"""Steps that are not finite, and ranks that compute wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.messages import KillWorker, ReportArrived, Run, SuspectNode
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase
from shoal_workers.contract.worker_reports import ReplayMismatch, ReplicaMismatch, ReplicasEqual, StepSkipped

NewWorld = Callable[..., Any]
NAN = ErrorReport(type="NonFinite", message="loss is nan", traceback="", phase=Phase.BACKWARD)


def diverge(world: Any) -> None:
    for worker in world.group():
        world.leave(worker, ExitKind.NON_FINITE, NAN)
    world.deliver_all()


def last_run(world: Any) -> Any:
    return [c.assignment for c in world.commands if isinstance(c, Run)][-1]


def rolling_back(new_world: NewWorld, *, most: int = 3) -> Any:
    health = {"non_finite": "roll_back", "max_non_finite": most}
    return new_world(workers=2, memory=True, health=health).open(then=6)


def test_a_rollback_restores_a_durable_checkpoint_and_skips_the_step(new_world: NewWorld) -> None:
    world = rolling_back(new_world)
    diverge(world)
    assert world.state.stage is Stage.FORMING
    run = last_run(world)
    assert run.restore_snapshot is None and run.restore_from.endswith("step-000000000004-a1-g1")
    assert run.skip_steps == (7,)
    assert world.events("step.rolled_back") == [{"step": 7, "to": 4, "message": "loss is nan"}]
    world.join()
    world.run(1)
    [incident] = world.incidents()
    assert (incident.cause, incident.steps_lost, incident.action) == (IncidentCause.NON_FINITE, 2, "roll back")


def test_a_skip_is_remembered_by_the_generations_that_follow(new_world: NewWorld) -> None:
    world = rolling_back(new_world)
    diverge(world)
    world.join()
    world.run(2)
    world.lose(1)
    assert last_run(world).skip_steps == (7,) and world.state.group.source.generation == 2


def test_rollbacks_in_a_row_are_bounded(new_world: NewWorld) -> None:
    world = rolling_back(new_world, most=2)
    for _ in range(2):
        diverge(world)
        world.join()
        world.run(1)
    diverge(world)
    assert world.end.reason is EndReason.NON_FINITE and "health.max_non_finite 2" in world.end.message


def test_a_newer_checkpoint_ends_the_row(new_world: NewWorld) -> None:
    world = rolling_back(new_world, most=1)
    diverge(world)
    world.join()
    world.run(5)
    assert world.state.checkpoints.newest == "step-000000000008-a1-g2" and world.state.budgets.rollbacks == 0
    diverge(world)
    assert world.end is None and last_run(world).skip_steps == (7, 10)


def test_a_skipped_step_is_reported_and_counted(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    world.feed(ReportArrived(0, StepSkipped(generation=1, step=6, at=world.now, loss=None, grad_norm=None, ranks=(1,))))
    assert world.events("step.skipped") == [{"step": 6, "loss": None, "grad_norm": None, "ranks": [1]}]
    assert world.state.progress.step == 6


def name(world: Any, rank: int) -> None:
    message = "micro-batch 3 gave another gradient than on ranks 0 and 2"
    named = ReplayMismatch(generation=world.state.group.generation, step=6, at=world.now, rank=rank, message=message)
    world.feed(ReportArrived(0, named))


def test_a_rank_that_computes_wrong_is_killed_and_memory_is_not_trusted(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=6)
    name(world, 1)
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [1]
    assert [c.node_id for c in world.commands if isinstance(c, SuspectNode)] == ["n1"]
    world.recover()
    group = world.state.group
    assert group.workers == (0, 3, 2) and group.source is None and world.state.progress.step == 4
    world.run(1)
    [incident] = world.incidents()
    assert (incident.cause, incident.witness, incident.ranks) == (IncidentCause.CORRUPTED, "replay", (1,))
    assert incident.steps_lost == 2 and "newest durable checkpoint" in incident.message


def test_snapshots_taken_since_are_trusted_again(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=6)
    name(world, 1)
    world.recover()
    world.run(2)
    world.lose(2)
    assert world.state.group.source.generation == 2 and world.state.progress.step == 6


def test_a_rank_that_several_name_is_killed_once(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    name(world, 1)
    name(world, 1)
    assert len(world.events("incident.opened")) == 1
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [1]


def recover_from_storage(world: Any) -> None:
    world.recover()
    world.finish_storage()
    world.join()


def equal(world: Any, step: int) -> None:
    report = ReplicasEqual(generation=world.state.group.generation, step=step, at=world.now, cpu_s=0.0)
    world.feed(ReportArrived(0, report))


def differ(world: Any, *ranks: int, is_certain: bool = True) -> None:
    report = ReplicaMismatch(
        generation=world.state.group.generation,
        step=world.state.progress.step,
        at=world.now,
        ranks=ranks,
        is_certain=is_certain,
        message="ranks hold other values",
    )
    world.feed(ReportArrived(0, report))


def test_after_corruption_no_checkpoint_later_than_the_last_clean_comparison_is_read(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=4)
    equal(world, 4)
    world.run(6)  # commits step 8
    assert world.state.checkpoints.unverified == ("step-000000000008-a1-g1",)
    differ(world, 1)
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [1]
    assert [c.node_id for c in world.commands if isinstance(c, SuspectNode)] == ["n1"]
    recover_from_storage(world)
    run = last_run(world)
    assert run.restore_snapshot is None and run.restore_from.endswith("step-000000000004-a1-g1")
    assert [e["name"] for e in world.events("checkpoint.damaged")] == ["step-000000000008-a1-g1"]
    world.run(1)
    [incident] = world.incidents()
    assert (incident.cause, incident.witness, incident.ranks) == (IncidentCause.CORRUPTED, "replicas", (1,))
    assert incident.steps_lost == 6 and "not later than step 4" in incident.message


def test_without_a_clean_comparison_the_state_is_that_from_which_the_group_started(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=6)
    differ(world, 1)
    recover_from_storage(world)
    run = last_run(world)
    assert (run.restore_from, run.restore_snapshot) == (None, None)


def test_two_replicas_are_both_suspected_and_neither_is_killed(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=6)
    equal(world, 4)
    differ(world, 0, 1, is_certain=False)
    assert [c.node_id for c in world.commands if isinstance(c, SuspectNode)] == ["n0", "n1"]
    recover_from_storage(world)
    assert [c for c in world.commands if isinstance(c, KillWorker)] == []
    assert last_run(world).restore_from.endswith("step-000000000004-a1-g1")
    world.run(1)
    [incident] = world.incidents()
    assert (incident.cause, incident.ranks) == (IncidentCause.CORRUPTED, ())


def test_a_wrong_result_of_an_unknown_rank_goes_back_and_suspects_no_node(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=6)
    equal(world, 4)
    differ(world, is_certain=False)
    recover_from_storage(world)
    assert [c for c in world.commands if isinstance(c, (SuspectNode, KillWorker))] == [] and world.end is None
    assert last_run(world).restore_from.endswith("step-000000000004-a1-g1")


def test_a_checkpoint_that_was_restored_is_trusted_and_a_snapshot_proves_nothing(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=6)
    world.lose(2)
    world.run(4)
    assert world.state.group.source is not None and world.state.checkpoints.clean_step == 0
    differ(world, 1)
    recover_from_storage(world)
    assert last_run(world).restore_from is None and world.state.checkpoints.clean_step == 0


def test_a_replay_that_differs_distrusts_the_checkpoints_since_the_last_replay(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True, health={"replay_every_steps": 4}).open(then=9)
    named = ReplayMismatch(generation=1, step=10, at=world.now, rank=1, message="another loss")
    world.feed(ReportArrived(0, named))
    recover_from_storage(world)
    assert last_run(world).restore_from.endswith("step-000000000004-a1-g1"), "step 8 is later than step 5"


def test_a_checkpoint_that_is_committed_after_the_difference_was_found_is_not_trusted_either(
    new_world: NewWorld,
) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=7)
    equal(world, 4)
    world.advance()
    [commit] = world.commits
    differ(world, 1)
    world.recover()
    world.finish_storage()
    assert commit.name == "step-000000000008-a1-g1" in world.state.checkpoints.damaged
    assert last_run(world).restore_from.endswith("step-000000000004-a1-g1")


@pytest.mark.parametrize("first", ["commit", "find"])
def test_a_checkpoint_that_is_committed_while_an_older_one_is_searched_is_not_trusted(
    new_world: NewWorld, first: str
) -> None:
    """The search was asked to leave step 8 out, and answers step 12, whose marker was written meanwhile."""
    world = new_world(workers=3, standby=1, memory=True)
    world.total_steps = 20
    world.open(then=9)
    equal(world, 4)
    world.train(3)
    world.deliver_all()
    assert [commit.name for commit in world.commits] == ["step-000000000012-a1-g1"]
    differ(world, 1)
    world.recover()
    assert world.state.stage is Stage.FALLING_BACK
    world.answer_commits()
    world.answer_finds()
    world.deliver(first)
    world.deliver_all()
    recover_from_storage(world)
    assert world.end is None
    assert last_run(world).restore_from.endswith("step-000000000004-a1-g1")
    damaged = ["step-000000000008-a1-g1", "step-000000000012-a1-g1"]
    assert [event["name"] for event in world.events("checkpoint.damaged")] == damaged
