"""How a group has ended, from the exits of its workers. Pure; `follow_up` acts on it, `exits` asks about one worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_service.core.attempt.faults import raised_errors
from shoal_service.core.attempt.faults.raised_errors import Culprit
from shoal_service.core.attempt.group import snapshot_reports
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Stage
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind, WorkerExit

_FRUITLESS_STORAGE_LIMIT = 3


class Outcome(StrEnum):
    """How a group has ended."""

    USER_ERROR = "user_error"
    ENGINE_ERROR = "engine_error"
    EVERY_WORKER_FAILED = "every_worker_failed"
    WORKERS_AT_FAULT = "workers_at_fault"
    """Some workers are to be replaced before anything else is decided."""
    NON_FINITE = "non_finite"
    DAMAGED_CHECKPOINT = "damaged_checkpoint"
    AS_PLANNED = "as_planned"
    RESULT_NOT_SAVED = "result_not_saved"
    """All steps are done, and the storage failed."""
    STORAGE_FAILED = "storage_failed"
    """Several groups in a row completed no step, and the storage failed."""
    SNAPSHOTS_UNKNOWN = "snapshots_unknown"
    """The group is lost, and other workers may still report a newer snapshot."""
    LOST = "lost"


_OUTCOMES = {
    Culprit.TASK: Outcome.USER_ERROR,
    Culprit.ENGINE: Outcome.ENGINE_ERROR,
    Culprit.EVERY_WORKER: Outcome.EVERY_WORKER_FAILED,
    Culprit.WORKERS: Outcome.WORKERS_AT_FAULT,
}


@dataclass(frozen=True, slots=True)
class OutcomeDecision:
    outcome: Outcome
    reason: str
    exits: tuple[WorkerExit, ...]
    """The exits that decided it."""


def decide(state: Attempt, now: float) -> OutcomeDecision | None:
    """From the exits of the group; None while one of its workers is in `run`."""
    if not state.group_active or not state.all_left:
        return None
    exits = tuple(state.group.exits.values())
    by_kind = {kind: tuple(e for e in exits if e.kind is kind) for kind in ExitKind}
    storage = by_kind[ExitKind.STORAGE_FAILED]
    if raised := raised_errors.decide(state):
        return OutcomeDecision(_OUTCOMES[raised.culprit], raised.reason, raised.exits)
    if bad := by_kind[ExitKind.NON_FINITE]:
        return OutcomeDecision(Outcome.NON_FINITE, f"step {bad[0].step + 1} is not finite", bad)
    restored = state.group.restored or state.checkpoints.origin
    if (damaged := by_kind[ExitKind.DAMAGED_CHECKPOINT]) and restored is not None:
        return OutcomeDecision(Outcome.DAMAGED_CHECKPOINT, f"{restored} is damaged", damaged)
    if len(exits) == len(state.group.workers) and len({(e.kind, e.step) for e in exits}) == 1 and is_planned(exits[0]):
        return OutcomeDecision(Outcome.AS_PLANNED, f"all ranks have {exits[0].kind} at step {exits[0].step}", exits)
    if storage and storage[0].step == state.history.total_steps:
        return OutcomeDecision(Outcome.RESULT_NOT_SAVED, message_of(storage[0]), storage)
    if storage and state.budgets.fruitless >= _FRUITLESS_STORAGE_LIMIT:
        return OutcomeDecision(Outcome.STORAGE_FAILED, message_of(storage[0]), storage)
    awaited = snapshot_reports.are_awaited(state, now)
    if awaited:
        return OutcomeDecision(Outcome.SNAPSHOTS_UNKNOWN, awaited.reason, exits)
    return OutcomeDecision(Outcome.LOST, "the group is lost, and what its survivors hold is known", exits)


def is_planned(worker_exit: WorkerExit) -> bool:
    return worker_exit.kind in (ExitKind.FINISHED, ExitKind.YIELDED)


def part_is_unreported(state: Attempt, index: int) -> bool:
    """This worker has left as planned, but has not reported its part of that step's checkpoint."""
    worker_exit = state.group.exits.get(index)
    if worker_exit is None or not is_planned(worker_exit):
        return False
    if not state.group_active and state.stage is not Stage.COMMITTING:
        return False
    name = str(CheckpointName(worker_exit.step, state.config.attempt, state.group.generation))
    return worker_exit.rank not in state.checkpoints.parts.get(name, {}) and not is_durable(state, worker_exit.step)


def is_durable(state: Attempt, step: int) -> bool:
    return state.checkpoints.newest is not None and state.checkpoints.durable_step >= step


def message_of(failed: WorkerExit) -> str:
    return failed.error.message if failed.error else "storage failed"
