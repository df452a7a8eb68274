"""Steps that are not finite, and ranks that compute wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_service.core.attempt.commands import KillWorker, Run, SuspectNode
from shoal_service.core.attempt.events import ReportArrived
from shoal_service.core.attempt.state.stages import Stage
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase
from shoal_workers.contract.worker_reports import ReplayMismatch, StepSkipped

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
    world.form()
    world.deliver_all()
    world.run(1)
    [incident] = world.incidents()
    assert (incident.cause, incident.steps_lost, incident.action) == (IncidentCause.NON_FINITE, 2, "roll back")


def test_a_skip_is_remembered_by_the_generations_that_follow(new_world: NewWorld) -> None:
    world = rolling_back(new_world)
    diverge(world)
    world.form()
    world.deliver_all()
    world.run(2)
    world.die(1)
    world.recover()
    assert last_run(world).skip_steps == (7,) and world.state.group.source.generation == 2


def test_rollbacks_in_a_row_are_bounded(new_world: NewWorld) -> None:
    world = rolling_back(new_world, most=2)
    for _ in range(2):
        diverge(world)
        world.form()
        world.deliver_all()
        world.run(1)
    diverge(world)
    assert world.end.reason is EndReason.NON_FINITE and "health.max_non_finite 2" in world.end.message


def test_a_newer_checkpoint_ends_the_row(new_world: NewWorld) -> None:
    world = rolling_back(new_world, most=1)
    diverge(world)
    world.form()
    world.deliver_all()
    world.run(5)
    assert world.state.checkpoints.newest == "step-000000000008-a1-g2" and world.state.budgets.rollbacks == 0
    diverge(world)
    assert world.end is None and last_run(world).skip_steps == (7, 10)


def test_a_skipped_step_is_reported_and_counted(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    world.feed(ReportArrived(0, StepSkipped(generation=1, step=6, at=world.now, loss=None, grad_norm=None)))
    assert world.events("step.skipped") == [{"step": 6, "loss": None, "grad_norm": None}]
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
    world.die(2)
    world.recover()
    assert world.state.group.source.generation == 2 and world.state.progress.step == 6


def test_a_rank_that_several_name_is_killed_once(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    name(world, 1)
    name(world, 1)
    assert len(world.events("incident.opened")) == 1
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [1]
