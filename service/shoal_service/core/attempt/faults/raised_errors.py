"""Who is to blame for the exceptions that ranks raised. A worker reports the class and the origin of its own exception
(`shoal_workers.contract.errors`); only here are the ranks compared.

    exception                        on some ranks                     on every rank, or again (see below)
    of the task's code               the task                          the task
    device, memory, system           these workers: they are replaced  in the task's code: the task
                                     and their nodes are suspected     elsewhere: the job ends as workers_failed
    of the engine's code             these workers: they are replaced  Shoal: the job ends as internal

A single rank is "some ranks". A fault that comes at the same step after a worker was replaced for it twice is not that
worker's: it counts as one on every rank. Pure; `group/outcome` calls `decide`, `group/follow_up` acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.health import RaisedFault
from shoal_service.core.quantities import count_text
from shoal_workers.contract.errors.classes import ErrorClass, Origin
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ErrorReport, ExitKind, WorkerExit

REPLACEMENTS = 2
"""Workers that are replaced in a row for the same fault at the same step."""

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


class Culprit(StrEnum):
    TASK = "task"
    ENGINE = "engine"
    EVERY_WORKER = "every_worker"
    """Nothing is known that could be replaced."""
    WORKERS = "workers"
    """Those of `exits`."""


@dataclass(frozen=True, slots=True)
class RaisedDecision:
    culprit: Culprit
    reason: str
    exits: tuple[WorkerExit, ...]
    """The exits that decided it."""


def decide(state: Attempt) -> RaisedDecision | None:
    """From the exits of a group that has left `run`; None: no rank raised, or those that did have been replaced."""
    raised = [e for index, e in state.group.exits.items() if e.error is not None and state.pool.worker(index)]
    if errors := tuple(e for e in raised if e.kind is ExitKind.USER_ERROR):
        return RaisedDecision(Culprit.TASK, f"{count_text(len(errors), 'rank')} raised an error", errors)
    for kind in _CAUSES:
        if faults := tuple(e for e in raised if e.kind is kind):
            return _of_faults(state, faults)
    return None


def fault_of(exits: tuple[WorkerExit, ...], last: RaisedFault | None) -> RaisedFault:
    """What is remembered of these exits once their workers are replaced."""
    this = RaisedFault(step=max(e.step for e in exits), kind=exits[0].kind, error_class=_report(exits[0]).error_class)
    times = last.times + 1 if last is not None and last.is_like(this) else 1
    return RaisedFault(step=this.step, kind=this.kind, error_class=this.error_class, times=times)


def cause_of(worker_exit: WorkerExit) -> IncidentCause:
    return _CAUSES[worker_exit.kind]


def message_of(worker_exit: WorkerExit) -> str:
    """For the incident."""
    report = _report(worker_exit)
    return f"{WORDS[report.error_class]} on rank {worker_exit.rank}: {report.type}: {report.message}"


def _of_faults(state: Attempt, faults: tuple[WorkerExit, ...]) -> RaisedDecision:
    num_ranks, last = len(state.group.workers), state.health.raised
    classes = {_report(e).error_class for e in faults}
    is_everywhere = len(faults) == num_ranks > 1 and len(classes) == 1
    is_repeated = last is not None and fault_of(faults, last).times > REPLACEMENTS
    if is_everywhere:
        reason = f"on all {count_text(num_ranks, 'rank')}"
    elif is_repeated:
        reason = f"for the third time at step {faults[0].step + 1}, after its workers were replaced"
    else:
        return RaisedDecision(Culprit.WORKERS, f"{len(faults)} of {count_text(num_ranks, 'rank')}", faults)
    if faults[0].kind is ExitKind.ENGINE_ERROR:
        return RaisedDecision(Culprit.ENGINE, reason, faults)
    is_the_tasks = all(_report(e).origin is Origin.TASK for e in faults)
    return RaisedDecision(Culprit.TASK if is_the_tasks else Culprit.EVERY_WORKER, reason, faults)


def _report(worker_exit: WorkerExit) -> ErrorReport:
    assert worker_exit.error is not None
    return worker_exit.error
