"""Which workers exist: they are started, replaced and dropped here. It never assigns a rank."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shoal_service.core.attempt import code_update, memory_snapshots, placement
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.state.worker import AvoidedNode, Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.workers import WorkerLeaving, WorkerStarted, WorkerStartFailed
from shoal_service.core.quantities import count_text
from shoal_workers.contract.backoff import backoff_s
from shoal_workers.contract.exception_causes import ErrorClass, Origin
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import ErrorReport, WorkerInfo
from shoal_workers.contract.worker_reports import PreemptionNotice

_REPLENISHING = (Stage.STARTING, Stage.WAITING, Stage.RUNNING)
"""Stages in which missing workers are started. Not while a group re-forms, nor before its first step: a starting worker
would slow the survivors down."""


def became_warm(turn: Turn, worker: Worker, info: WorkerInfo) -> None:
    turn.pool = turn.pool.with_worker(replace(worker, info=info, warm_at=turn.now))
    turn.budgets = replace(turn.budgets, failed_starts=0)
    turn.emit(
        WorkerStarted(
            worker_id=info.worker_id, pid=info.pid, node_id=info.node_id, node_ip=info.node_ip, rack=info.rack
        )
    )
    memory_snapshots.ask_if_useful(turn, worker.index)  # it may serve what workers before it have left on its node


def unreachable(turn: Turn, worker: Worker) -> None:
    """Note that calls to a worker fail. This is not a failure yet: the error may be transient. See
    Timeouts.unreachable_s."""
    if worker.warm and worker.unreachable_since is None:
        turn.pool = turn.pool.with_worker(replace(worker, unreachable_since=turn.now))


def answered(turn: Turn, index: int) -> None:
    """Note that a worker has answered, so an error before was transient. If it could not be asked for its snapshots
    before, it is asked now."""
    worker = turn.pool.worker(index)
    if worker is not None and worker.unreachable_since is not None:
        turn.pool = turn.pool.with_worker(replace(worker, unreachable_since=None))
        if not worker.in_run and index not in turn.group.exits:
            memory_snapshots.ask_if_useful(turn, index)


def failed_to_start(turn: Turn, worker: Worker, error: ErrorReport) -> None:
    """The task could not be loaded in a worker. Before the first group the job fails. Later only this worker is
    dropped; at any time, if the reason is outside the task's code."""
    if code_update.refused_by(turn, worker, f"a worker could not load it: {error.sentence}"):
        return
    if error.error_class is not ErrorClass.PLAIN:
        message = f"{error.type}: {error.message}"
        turn.emit(WorkerStartFailed(worker_id=worker.worker_id, error=message))
        turn.kill(worker.index, "it could not start")
        start_died(turn, worker, message)
    elif not turn.history.has_formed:
        failure = error.as_failure(ranks=(), step=0)
        reason = EndReason.USER_ERROR if error.origin is Origin.TASK else EndReason.INTERNAL
        turn.end(reason, failure.sentence, failure)
    else:
        turn.emit(WorkerStartFailed(worker_id=worker.worker_id, error=error.sentence))
        turn.kill(worker.index, "the task could not be loaded in it")
        failed = turn.budgets.failed_starts + 1
        turn.budgets = replace(turn.budgets, failed_starts=failed, grow_not_before=turn.now + 30.0)


def start_died(turn: Turn, worker: Worker, message: str) -> None:
    """A worker died before it was warm. Too many in a row end the attempt if no group runs; while one runs, the next
    start is delayed longer each time."""
    if code_update.refused_by(turn, worker, f"a worker ended before it was warm: {message}"):
        return
    failed = turn.budgets.failed_starts + 1
    turn.budgets = replace(turn.budgets, failed_starts=failed)
    if turn.stage is Stage.RUNNING:
        turn.budgets = replace(turn.budgets, grow_not_before=turn.now + backoff_s(failed, first_s=2.0, longest_s=60.0))
    limit = 3 * max(1, turn.target.granted)
    if failed >= limit and turn.stage in (Stage.STARTING, Stage.WAITING):
        turn.end(
            EndReason.START_FAILED,
            f"{count_text(failed, 'worker')} in a row died while starting; the last one: {message}",
        )


def about_to_leave(turn: Turn, index: int, notice: PreemptionNotice) -> None:
    """The worker, not its node, will be taken away soon: it got SIGTERM or a preemption notice."""
    worker = turn.pool.worker(index)
    if worker is None or worker.info is None or worker.leave is not None:
        return
    deadline = turn.now + notice.grace_s
    leave = AvoidedNode(node_id=worker.info.node_id, reason=notice.reason, deadline=deadline)
    turn.pool = turn.pool.with_worker(replace(worker, leave=leave))
    rank, grace_s = turn.group.rank_of(index), notice.grace_s
    turn.emit(WorkerLeaving(worker_id=worker.worker_id, rank=rank, reason=notice.reason, grace_s=grace_s))


def replenish(turn: Turn) -> None:
    """Start the workers that the target lacks. Drop those that have to leave and those beyond the target, the newest
    first, but none of the group."""
    state = turn.state
    is_before_first_step = state.stage is Stage.RUNNING and state.incident is not None
    if state.stage not in _REPLENISHING or (is_before_first_step and not state.has_run_long(turn.now)):
        return
    is_trial = state.code.trial is not None  # until it is over, the workers with the code before need their places
    if not is_trial and (not state.budgets.failed_starts or turn.now >= state.budgets.grow_not_before):
        _start_missing(turn)
    if (
        state.stage is Stage.RUNNING
        and state.group.source is not None
        and state.progress.step == state.group.start_step
    ):
        return  # until the new group has its own snapshot, the workers that leave may be needed to serve the old one
    _drop_leavers(turn)
    _drop_surplus(turn)
    _drop_other_code(turn)


def _drop_leavers(turn: Turn) -> None:
    """Drop the workers outside the group that have to leave. While the attempt waits they may still serve their
    snapshots, so they stay until their deadline."""
    state = turn.state
    for worker in _spare(state):
        leave = placement.find_leave(state, worker)
        if leave is None and worker.slow_until is None:
            continue
        if state.stage is not Stage.WAITING or placement.is_due(state, worker, turn.now):
            reason = leave.reason if leave is not None else "it computed too slowly for the others"
            turn.release(worker, reason)


def _start_missing(turn: Turn) -> None:
    state = turn.state
    slow = {
        p.info.node_id for p in state.pool.workers if p.info is not None and (p.slow_until is not None or p.left_out)
    }
    avoided = tuple(sorted({node.node_id for node in state.target.avoided} | slow))
    num_missing = state.target.num_workers - len(_staying(state))
    tp = turn.plan(state.target.spec, state.target.granted, state.config.profile).layout.tp if num_missing > 0 else 1
    for still_missing in range(num_missing, 0, -1):
        turn.start_worker(
            state.code.current,
            only_on=memory_snapshots.next_node(turn.state),
            avoids=avoided,
            touches_memory=not state.health.is_memory_scarce,
            num_missing=still_missing,
            tp=tp,
        )


def _drop_surplus(turn: Turn) -> None:
    state = turn.state
    staying = _staying(state)
    surplus = max(0, len(staying) - state.target.num_workers)
    if not surplus:
        return
    indexes, ranks = {p.index for p in staying}, state.group.ranks
    spare = [p for p in _spare(state) if p.index in indexes]
    for worker in sorted(spare, key=lambda p: (p.warm and not p.left_out, p.index in ranks, -p.index))[:surplus]:
        turn.release(worker, "more workers than granted")


def _drop_other_code(turn: Turn) -> None:
    """Drop the workers with a version of the code that is neither the current one nor needed by an update."""
    state, update = turn.state, turn.code.update
    kept = {state.code.current} | ({update.version, update.before} if update is not None else set())
    for worker in _spare(state) if state.stage is Stage.RUNNING else ():
        if worker.code not in kept:
            turn.release(worker, "it has another version of the code")


def _staying(state: Attempt) -> list[Worker]:
    """List the workers that count for the target; the others are to be replaced. A worker that is left out is expected
    to answer again, unless no group can form without it."""
    is_short = state.stage is Stage.WAITING and state.num_usable < state.target.min_workers
    leaving = placement.leaving_nodes(state)
    return [p for p in state.workers if not placement.has_to_leave(p, leaving) and not (is_short and p.left_out)]


def _spare(state: Attempt) -> list[Worker]:
    """List the workers outside the group. A worker that has left `run` belongs to the group: it may still have reports
    to send."""
    group: Collection[int] = state.group.ranks if state.group_active else ()
    return [worker for worker in state.pool.workers if not worker.in_run and worker.index not in group]
