"""4 PLAN, first half: how a group has ended, from the exits of its workers. Pure; `planning` acts on it.

Workers report the class and the origin of their own exceptions (`contract.exception_causes`); only here are the
ranks compared:

    exception                        on some ranks                     on every rank, or again (see below)
    of the task's code               the task                          the task
    device, memory, system           these workers: they are replaced  in the task's code: the task
                                     and their nodes are suspected     elsewhere: the job ends as workers_failed
    of the engine's code             these workers: they are replaced  Shoal: the job ends as internal

A single rank is "some ranks". A fault that comes at the same step after a worker was replaced for it twice is not that
worker's: it counts as one on every rank.

An error of a script counts only if no other rank of its group was lost (`is_of_a_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_service.core.attempt import memory_snapshots
from shoal_service.core.attempt.state.attempt import Attempt, RaisedFault
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.quantities import count_text
from shoal_workers.contract.exception_causes import ErrorClass, Origin
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ErrorReport, ExitKind, WorkerExit

_FRUITLESS_STORAGE_LIMIT = 3


class Outcome(StrEnum):
    """How a group has ended."""

    USER_ERROR = "user_error"
    ENGINE_ERROR = "engine_error"
    EVERY_WORKER_FAILED = "every_worker_failed"
    """Every worker has failed, and nothing is known that could be replaced."""
    WORKERS_AT_FAULT = "workers_at_fault"
    """Some workers are at fault, and are replaced before anything else is decided."""
    NON_FINITE = "non_finite"
    DAMAGED_CHECKPOINT = "damaged_checkpoint"
    AS_PLANNED = "as_planned"
    RESULT_NOT_SAVED = "result_not_saved"
    """All steps are done, and the storage failed to keep the result."""
    STORAGE_FAILED = "storage_failed"
    """Several groups in a row completed no step, and the storage failed."""
    SNAPSHOTS_UNKNOWN = "snapshots_unknown"
    """The group is lost, and other workers may still report a newer snapshot."""
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class OutcomeDecision:
    outcome: Outcome
    reason: str
    exits: tuple[WorkerExit, ...]
    """The exits that decided the outcome."""


def decide(state: Attempt, now: float) -> OutcomeDecision | None:
    """Decide how the group ended from the exits of its workers; None while one of them is in `run`."""
    if not state.group_active or not state.all_left:
        return None
    exits = tuple(state.group.exits.values())
    by_kind = {kind: tuple(e for e in exits if e.kind is kind) for kind in ExitKind}
    storage = by_kind[ExitKind.STORAGE_FAILED]
    if raised := of_raised_errors(state):
        return raised
    if bad := by_kind[ExitKind.NON_FINITE]:
        return OutcomeDecision(Outcome.NON_FINITE, f"step {bad[0].step + 1} is not finite", bad)
    restored = state.group.restored or state.checkpoints.origin
    if (damaged := by_kind[ExitKind.DAMAGED_CHECKPOINT]) and restored is not None:
        return OutcomeDecision(Outcome.DAMAGED_CHECKPOINT, f"{restored} is damaged", damaged)
    if len(exits) == len(state.group.workers) and _is_together(state, exits) and is_planned(exits[0]):
        return OutcomeDecision(Outcome.AS_PLANNED, f"all ranks have {exits[0].kind} at step {exits[0].step}", exits)
    if storage and storage[0].step == state.history.total_steps:
        return OutcomeDecision(Outcome.RESULT_NOT_SAVED, words_of_storage(storage[0]), storage)
    if storage and state.budgets.fruitless >= _FRUITLESS_STORAGE_LIMIT:
        return OutcomeDecision(Outcome.STORAGE_FAILED, words_of_storage(storage[0]), storage)
    awaited = memory_snapshots.are_awaited(state, now)
    if awaited:
        return OutcomeDecision(Outcome.SNAPSHOTS_UNKNOWN, awaited.reason, exits)
    return OutcomeDecision(Outcome.LOST, "the group is lost, and what its survivors hold is known", exits)


def _is_together(state: Attempt, exits: tuple[WorkerExit, ...]) -> bool:
    """Whether all ranks have left at the same boundary. The processes of a script may end one after the other, so some
    may be done while the others are asked to leave."""
    if state.target.is_script:
        return all(map(is_planned, exits))
    return len({(e.kind, e.step) for e in exits}) == 1


def is_planned(worker_exit: WorkerExit) -> bool:
    return worker_exit.kind in (ExitKind.FINISHED, ExitKind.YIELDED)


def part_is_unreported(state: Attempt, index: int) -> bool:
    """Whether this worker has left as planned, but has not reported its part of that step's checkpoint. A script has no
    such parts."""
    worker_exit = state.group.exits.get(index)
    if worker_exit is None or not is_planned(worker_exit) or state.target.is_script:
        return False
    if not state.group_active and state.stage is not Stage.COMMITTING:
        return False
    name = str(CheckpointName(worker_exit.step, state.config.attempt, state.group.generation))
    return worker_exit.rank not in state.checkpoints.parts.get(name, {}) and not is_durable(state, worker_exit.step)


def is_durable(state: Attempt, step: int) -> bool:
    return state.checkpoints.newest is not None and state.checkpoints.durable_step >= step


def words_of_storage(failed: WorkerExit) -> str:
    return failed.error.message if failed.error else "storage failed"


CRASH = "crash"
"""Value of `ErrorReport.mistake` and `UserFailure.mistake`: a process was killed by a signal that it caused itself."""
REPLACEMENTS = 2
"""How often in a row workers are replaced for the same fault at the same step."""

_CAUSES = {
    ExitKind.WORKER_FAULT: IncidentCause.WORKER_FAULT,
    ExitKind.ENGINE_ERROR: IncidentCause.ENGINE_ERROR,
}
WORDS: dict[ErrorClass, str] = {
    ErrorClass.PLAIN: "Shoal's own code failed",
    ErrorClass.DEVICE: "the GPU failed",
    ErrorClass.DEVICE_MEMORY: "the GPU is out of memory",
    ErrorClass.HOST_MEMORY: "the node is out of memory",
    ErrorClass.NETWORK: "NCCL failed",
    ErrorClass.SYSTEM: "the operating system failed",
}


def of_raised_errors(state: Attempt) -> OutcomeDecision | None:
    """The outcome that follows from the errors that ranks of a group have raised; None: no rank raised, or those that
    did have been replaced."""
    raised = [e for index, e in state.group.exits.items() if e.error is not None and state.pool.worker(index)]
    if state.target.is_script and is_of_a_loss(state):
        raised = [e for e in raised if e.error is not None and e.error.mistake == CRASH]
    if errors := tuple(e for e in raised if e.kind is ExitKind.USER_ERROR):
        return OutcomeDecision(Outcome.USER_ERROR, f"{count_text(len(errors), 'rank')} raised an error", errors)
    for kind in _CAUSES:
        if faults := tuple(e for e in raised if e.kind is kind):
            return _of_faults(state, faults)
    return None


def is_of_a_loss(state: Attempt) -> bool:
    """Whether another rank was lost, so an error that a script raises follows from that: a script calls its collectives
    itself, and says in its own ways that a peer is gone. A crash does not follow from it."""
    return any(e.kind is ExitKind.SCRIPT_DIED for e in state.group.exits.values()) or has_lost_worker(state)


def has_lost_worker(state: Attempt) -> bool:
    """Whether a worker of the group is gone, and not because of an error."""
    if state.incident is None or state.incident.cause is IncidentCause.STUCK:
        return False  # a worker that is stuck was ended because of the error
    return any(index not in state.group.exits and _is_gone(state, index) for index in state.group.workers)


def _is_gone(state: Attempt, index: int) -> bool:
    worker = state.pool.worker(index)
    return worker is None or worker.left_out is not None


def fault_of(exits: tuple[WorkerExit, ...], last: RaisedFault | None) -> RaisedFault:
    """The fault that is remembered once the workers of these exits are replaced."""
    this = RaisedFault(step=max(e.step for e in exits), kind=exits[0].kind, error_class=_report(exits[0]).error_class)
    times = last.times + 1 if last is not None and last.is_like(this) else 1
    return RaisedFault(step=this.step, kind=this.kind, error_class=this.error_class, times=times)


def is_repeated(state: Attempt, faults: tuple[WorkerExit, ...]) -> bool:
    """Whether workers were replaced for this fault before, as often as that is done."""
    return faults[0].kind in _CAUSES and fault_of(faults, state.health.raised).times > REPLACEMENTS


def cause_of(worker_exit: WorkerExit) -> IncidentCause:
    return _CAUSES[worker_exit.kind]


def words_of_error(worker_exit: WorkerExit) -> str:
    """The error in words, for the incident."""
    report = _report(worker_exit)
    return f"{WORDS[report.error_class]} on rank {worker_exit.rank}: {report.type}: {report.message}"


def _of_faults(state: Attempt, faults: tuple[WorkerExit, ...]) -> OutcomeDecision:
    num_ranks = len(state.group.workers)
    classes = {_report(e).error_class for e in faults}
    is_everywhere = len(faults) == num_ranks > 1 and len(classes) == 1
    if is_everywhere:
        reason = f"on all {count_text(num_ranks, 'rank')}"
    elif is_repeated(state, faults):
        reason = f"for the third time at step {faults[0].step + 1}, after its workers were replaced"
    else:
        return OutcomeDecision(Outcome.WORKERS_AT_FAULT, f"{len(faults)} of {count_text(num_ranks, 'rank')}", faults)
    if faults[0].kind is ExitKind.ENGINE_ERROR:
        return OutcomeDecision(Outcome.ENGINE_ERROR, reason, faults)
    is_the_tasks = all(_report(e).origin is Origin.TASK for e in faults)
    return OutcomeDecision(Outcome.USER_ERROR if is_the_tasks else Outcome.EVERY_WORKER_FAILED, reason, faults)


def _report(worker_exit: WorkerExit) -> ErrorReport:
    assert worker_exit.error is not None
    return worker_exit.error
