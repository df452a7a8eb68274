"""Workers of the group leave `run`, as planned or because of a fault. After a fault the others are interrupted, and
those that do not react are killed.

Called by `machine` for each exit and each lost worker, and by `deadlines`. It never decides what follows: `follow_up`
does, when no worker is in `run` any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal_service.core.attempt import nodes, worker_pool
from shoal_service.core.attempt.commands import Interrupt, KillWorker
from shoal_service.core.attempt.faults import crashes, hangs, large_groups, out_of_memory, silences, suspicion
from shoal_service.core.attempt.faults.blame import blame, distrust_memory
from shoal_service.core.attempt.faults.table import CAUSE_OF_EXIT, FAULTS, Memory
from shoal_service.core.attempt.group import follow_up, orphaned_snapshots, outcome, saved_parts, snapshot_reports
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Quiescing, Stage, Switching
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.checkpoints import CheckpointFailed
from shoal_service.core.events.workers import WorkerLost
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ExitKind, WorkerExit


def worker_lost(turn: Turn, index: int, cause: IncidentCause, witness: str, message: str) -> None:
    """A worker is gone. If it had not left `run`, its group is lost. If it had, its part of the last checkpoint may be
    lost."""
    if turn.pool.worker(index) is None:
        return
    worker = turn.drop_worker(index)
    crashes.worker_died(turn, worker, cause)
    silences.lost(turn, worker, cause, message)
    if FAULTS[cause].is_preemption_after_notice and nodes.leave_of(turn.state, worker) is not None:
        cause = IncidentCause.PREEMPTED
    turn.emit(WorkerLost(worker_id=worker.worker_id, rank=turn.group.rank_of(index), cause=cause, message=message))
    distrust_memory(turn, cause)
    if not out_of_memory.is_out_of_memory(message):
        suspicion.worker_was_lost(turn, worker, cause)
    out_of_memory.death_explained(turn, worker.worker_id, message)
    if worker.only_on and not worker.warm and FAULTS[cause].memory is Memory.LOST:
        orphaned_snapshots.node_is_gone(turn, worker.only_on)  # no fault of the worker's start
    elif not worker.warm:
        worker_pool.start_died(turn, worker, message)
    elif worker.in_run and turn.state.group_active:
        orphaned_snapshots.note_lost_worker(turn, worker, cause)
        _lose(turn, cause, witness, message, worker)
        turn.has_exits = True
    elif outcome.part_is_unreported(turn.state, index):
        orphaned_snapshots.note_lost_worker(turn, worker, cause)
        blame(turn, cause, witness, message, worker)
        follow_up.after_commit(turn)
    elif turn.stage is Stage.QUIESCING:
        turn.has_exits = True  # it may have been the last one that was asked for its snapshots


def evict(turn: Turn, index: int, cause: IncidentCause, witness: str, message: str) -> None:
    """Kill a worker that is alive, or may be, and treat it as lost."""
    if turn.pool.worker(index) is not None:
        turn.do(KillWorker(index, message))
        worker_lost(turn, index, cause, witness, message)


def run_returned(turn: Turn, index: int, worker_exit: WorkerExit) -> None:
    state = turn.state
    worker = state.pool.worker(index)
    if worker is not None and worker.left_out is not None and worker.left_out.generation == worker_exit.generation:
        worker = replace(worker, left_out=None)  # it answers, and has left
        turn.pool = turn.pool.with_worker(worker)
        if worker_exit.generation != state.group.generation:
            snapshot_reports.request_if_useful(turn, index)
    if worker_exit.generation != state.group.generation or worker is None:
        return  # of a generation that is over
    turn.pool = turn.pool.with_worker(replace(worker, in_run=False))
    turn.group = replace(turn.group, exits=turn.group.exits.with_item(index, worker_exit))
    turn.progress = replace(turn.progress, step=max(turn.progress.step, worker_exit.step))
    if worker_exit.saved_part is not None:
        saved_parts.arrived(turn, worker_exit.saved_part)
    if outcome.is_planned(worker_exit):
        if turn.stage in (Stage.FORMING, Stage.RUNNING):
            # not requested: the others are about to leave as well, or exceed the deadline
            turn.enter(Switching(since=turn.now, durable=not turn.target.keeps_snapshots))
    elif turn.stage is not Stage.QUIESCING and turn.state.group_active:
        detail = worker_exit.error.message if worker_exit.error else str(worker_exit.kind)
        witness = f"rank {worker_exit.rank}"
        if worker_exit.kind in CAUSE_OF_EXIT:
            _lose(turn, CAUSE_OF_EXIT[worker_exit.kind], witness, detail, None)
        else:
            if worker_exit.kind is ExitKind.STORAGE_FAILED:
                turn.emit(CheckpointFailed(rank=worker_exit.rank, step=worker_exit.step, message=detail))
                turn.budgets = replace(turn.budgets, grow_not_before=turn.now + 60.0)
            if worker_exit.kind in (ExitKind.USER_ERROR, ExitKind.WORKER_FAULT, ExitKind.ENGINE_ERROR):
                _await_same_error(turn)
            else:
                _quiesce(turn)
    turn.has_exits = True


def lose_group(turn: Turn, cause: IncidentCause, witness: str, message: str) -> None:
    """The group is given up although none of its workers is known to be gone."""
    _lose(turn, cause, witness, message, None)
    turn.has_exits = True


def leave_out(turn: Turn, workers: Sequence[tuple[Worker, str]]) -> None:
    """With the reasons. The group goes on without these workers, which are in `run`. They are fenced: the interrupt
    reaches them when their node answers again."""
    for worker, message in workers:
        blame(turn, IncidentCause.NODE_UNREACHABLE, "no answer to connects", message, worker)
    _quiesce(turn)
    turn.do(*(Interrupt(worker.index, turn.group.generation) for worker, _ in workers))
    turn.has_exits = True


def interrupt_acknowledged(turn: Turn, index: int, generation: int) -> None:
    worker = turn.pool.worker(index)
    if worker is not None and turn.stage is Stage.QUIESCING and generation == turn.group.generation:
        turn.pool = turn.pool.with_worker(replace(worker, acknowledged=generation))


def evict_unresponsive(turn: Turn) -> None:
    """In QUIESCING: workers that do not react to the interrupt in time are killed and replaced."""
    quiescing = turn.current
    if isinstance(quiescing, Quiescing):
        for eviction in unresponsive(turn.state, quiescing, turn.now):
            evict(turn, eviction.index, eviction.cause, eviction.witness, eviction.reason)


@dataclass(frozen=True, slots=True)
class Eviction:
    index: int
    cause: IncidentCause
    witness: str
    reason: str


def unresponsive(state: Attempt, quiescing: Quiescing, now: float) -> list[Eviction]:
    """The workers of a lost group that are not waited for any longer, by rank."""
    if quiescing.interrupted_at is None:
        return []
    waited, quiesce_s = now - quiescing.interrupted_at, large_groups.quiesce_s(state)
    unresponsive_s = state.config.timeouts.unresponsive_s + large_groups.later_s(len(state.pool.workers))
    hung = state.incident is not None and state.incident.cause is IncidentCause.HUNG
    too_late = IncidentCause.HUNG if hung else IncidentCause.STUCK
    silent = hangs.unanswering(state, now) if hung else frozenset()
    generation, found = state.group.generation, []
    for index in state.in_run:
        worker = state.pool.worker(index)
        has_acknowledged = worker is not None and worker.acknowledged == generation
        if worker is not None and worker.unreachable_since is not None:
            reason = f"it does not answer, and generation {generation} has failed"
            found.append(Eviction(index, IncidentCause.UNREACHABLE, "no answer", reason))
        elif index in silent and not has_acknowledged:
            reason = f"it has left its polls unanswered for {hangs.silent_s(state):g} s or more"
            found.append(Eviction(index, IncidentCause.HUNG, "no answer", reason))
        elif not has_acknowledged and waited >= unresponsive_s:
            reason = f"it did not acknowledge the end of generation {generation} within {unresponsive_s:.3g} s"
            found.append(Eviction(index, too_late, "deadline", reason))
        elif waited >= quiesce_s:
            reason = f"it did not leave generation {generation} within {quiesce_s:.3g} s"
            found.append(Eviction(index, too_late, "deadline", reason))
    return found


def interrupt_rest(turn: Turn) -> None:
    """Interrupt the workers that are still in `run`."""
    quiescing = turn.current
    assert isinstance(quiescing, Quiescing)
    turn.stay(replace(quiescing, interrupt_at=None, interrupted_at=turn.now))
    turn.do(*(Interrupt(index, turn.group.generation) for index in turn.state.in_run))
    evict_unresponsive(turn)


def _lose(turn: Turn, cause: IncidentCause, witness: str, message: str, worker: Worker | None) -> None:
    """The group is lost: it quiesces."""
    blame(turn, cause, witness, message, worker)
    _quiesce(turn)


def _quiesce(turn: Turn) -> None:
    if turn.stage is Stage.QUIESCING:
        return
    _enter_quiescing(turn)
    interrupt_rest(turn)


def _await_same_error(turn: Turn) -> None:
    """A slower rank may be about to raise the same error. The interrupt waits for it."""
    grace_s = turn.config.timeouts.user_error_grace_s + large_groups.later_s(len(turn.pool.workers))
    _enter_quiescing(turn, interrupt_at=turn.now + grace_s)


def _enter_quiescing(turn: Turn, *, interrupt_at: float | None = None) -> None:
    switching = turn.current
    durable = switching.durable if isinstance(switching, Switching) else not turn.target.keeps_snapshots
    turn.enter(Quiescing(since=turn.now, interrupt_at=interrupt_at, durable=durable))
    snapshot_reports.request_from_others(turn)
