"""Parts of the simulated world: constants, workers, and their messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shoal_service.core.attempt.messages import Directed
from shoal_service.core.attempt.state.attempt import ATTEMPT_JSON, Attempt, Target
from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import Assignment, ErrorReport, Phase
from shoal_workers.contract.worker_reports import SavedPart, StepReport

ROOT = "/checkpoints/j1"
TOTAL_STEPS = 12
TICK_S = 0.25
MEMORY_PORT = 7000
TIMEOUTS = Timeouts(
    quiesce_s=5.0,
    form_s=20.0,
    start_s=60.0,
    gather_s=3.0,
    settle_s=3.0,
    commit_s=20.0,
    switch_s=40.0,
    level_trial_s=10.0,
)


@dataclass
class FakeWorker:
    """One simulated worker. It acts only when the test calls for it."""

    index: int
    worker_id: str
    alive: bool = True
    is_warm: bool = False
    is_stuck: bool = False
    """Its training thread cannot be woken."""
    is_stopped: bool = False
    """SIGSTOP or network loss: it does not receive messages."""
    node_id: str = ""
    run: Assignment | None = None
    step: int = 0
    yields: bool | None = None
    """A yield at the next step boundary was requested; True: with a durable checkpoint."""
    fenced: bool = False


def directed(target: Target, **changes: Any) -> Directed:
    """A document that wants what the target is, but for these values."""
    same = Directed(
        granted=target.granted,
        desired=target.desired,
        elasticity=target.spec.elasticity,
        parallelism=target.spec.parallelism,
        settings=target.settings,
        code=target.spec.code.archive or "",
        server_stops=target.server_stops,
        is_preempted=target.is_preempted,
        moves_to=target.moves_to,
        pinned=target.pinned,
    )
    return same.model_copy(update=changes)


def part_of(run: Assignment, step: int) -> SavedPart:
    return SavedPart(
        generation=run.generation,
        step=step,
        rank=run.rank,
        world_size=run.world_size,
        directory=f"{ROOT}/{CheckpointName(step, run.attempt, run.generation)}",
        files=(),
        stall_s=0.1,
        write_s=0.2,
    )


def copy_of(state: Attempt) -> Attempt:
    """Shares only what cannot be changed: every dict is another one."""
    parts = {name: dict(by_rank) for name, by_rank in state.checkpoints.parts.items()}
    requested, reported = dict(state.snapshots.requested), dict(state.snapshots.reported)
    stamps, answered_at = dict(state.progress.stamps), dict(state.progress.answered_at)
    slow_steps = dict(state.progress.slow_steps)
    return replace(
        state,
        group=replace(state.group, exits=dict(state.group.exits)),
        snapshots=replace(state.snapshots, requested=requested, reported=reported),
        checkpoints=replace(state.checkpoints, parts=parts),
        health=replace(state.health, suspected=dict(state.health.suspected)),
        progress=replace(state.progress, stamps=stamps, answered_at=answered_at, slow_steps=slow_steps),
        ledger=replace(state.ledger, booked=dict(state.ledger.booked)),
    )


def from_journal(state: Attempt) -> Attempt:
    """The state as a restarted supervisor would read it."""
    return ATTEMPT_JSON.validate_json(ATTEMPT_JSON.dump_json(state))


def step_report(run: Assignment, step: int, at: float, step_s: float = 0.5) -> StepReport:
    return StepReport(
        generation=run.generation,
        step=step,
        at=at,
        loss=3.0,
        grad_norm=1.0,
        lr=1e-3,
        tokens=8,
        step_s=step_s,
        world_size=run.world_size,
    )


def error_of(type_: str, message: str) -> ErrorReport:
    return ErrorReport(type=type_, message=message, traceback="Traceback ...", phase=Phase.FORWARD)


def name_of(text: str) -> CheckpointName:
    parsed = CheckpointName.parse(text)
    assert parsed is not None
    return parsed
