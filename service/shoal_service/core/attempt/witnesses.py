"""1 WITNESS and 3 QUIESCE: workers leave `run`, die, fall silent or are given up. What they did is noted, and if the
group is lost because of it, its other workers are interrupted.

    a worker is lost        its process died, or it is evicted: a crash, lack of memory, a node that Ray declared dead
    a worker left `run`     as planned, or with an error: the others are interrupted
    a node is silent        its workers are left out, and take part again when it answers; that a node is dead is Ray's
                            verdict, which is not taken back

Called by `machine` for each event, by `wrong_results`, and by `deadlines`, which evicts the workers that do not react
to the interrupt in time. `incidents` keeps what happened, `suspicion` what it says about nodes. What follows is decided
by `planning`, when no worker is in `run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal_service.core.attempt import (
    checkpoints,
    deaths,
    departures,
    incidents,
    large_groups,
    memory_snapshots,
    suspicion,
    verdict,
    worker_pool,
)
from shoal_service.core.attempt.commands import Interrupt, KillWorker
from shoal_service.core.attempt.faults import CAUSE_OF_EXIT, FAULTS, Memory
from shoal_service.core.attempt.incidents import blame, distrust_memory
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Quiescing, Stage, Switching
from shoal_service.core.attempt.state.worker import LeftOut, Worker
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.events.training import CheckpointFailed
from shoal_service.core.events.workers import NodeAnswers, NodeSilent, WorkerLost
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ExitKind, WorkerExit


def worker_lost(turn: Turn, index: int, cause: IncidentCause, witness: str, message: str) -> None:
    """Note that a worker is gone. If it had not left `run`, its group is lost. If it had, its part of the last
    checkpoint may be lost."""
    if turn.pool.worker(index) is None:
        return
    worker = turn.drop_worker(index)
    deaths.note_death(turn, worker, cause)
    incidents.silent_node_lost(turn, worker, cause, message)
    if FAULTS[cause].is_preemption_after_notice and departures.leave_of(turn.state, worker) is not None:
        cause = IncidentCause.PREEMPTED
    turn.emit(WorkerLost(worker_id=worker.worker_id, rank=turn.group.rank_of(index), cause=cause, message=message))
    distrust_memory(turn, cause)
    if not deaths.is_out_of_memory(message):  # else its node is full, which says nothing against the node
        suspicion.worker_was_lost(turn, worker, cause)
    deaths.memory_killed(turn, worker.worker_id, message)
    if worker.only_on and not worker.warm and FAULTS[cause].memory is Memory.LOST:
        memory_snapshots.node_is_gone(turn, worker.only_on)  # no fault of the worker's start
    elif not worker.warm:
        worker_pool.start_died(turn, worker, message)
    elif worker.in_run and turn.state.group_active:
        memory_snapshots.note_lost_worker(turn, worker, cause)
        _lose(turn, cause, witness, message, worker)
        turn.has_exits = True
    elif verdict.part_is_unreported(turn.state, index):
        memory_snapshots.note_lost_worker(turn, worker, cause)
        blame(turn, cause, witness, message, worker)
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
            memory_snapshots.ask_if_useful(turn, index)
    if worker_exit.generation != state.group.generation or worker is None:
        return  # of a generation that is over
    turn.pool = turn.pool.with_worker(replace(worker, in_run=False))
    turn.group = replace(turn.group, exits=turn.group.exits.with_item(index, worker_exit))
    turn.progress = replace(turn.progress, step=max(turn.progress.step, worker_exit.step))
    if worker_exit.saved_part is not None:
        checkpoints.part_saved(turn, worker_exit.saved_part)
    if verdict.is_planned(worker_exit):
        if turn.stage in (Stage.FORMING, Stage.RUNNING):
            # not requested: the others are about to leave as well, or exceed the deadline
            turn.enter(Switching(since=turn.now, durable=not turn.target.keeps_snapshots))
    elif turn.stage is not Stage.QUIESCING and turn.state.group_active:
        detail, witness = _words_of(worker_exit), f"rank {worker_exit.rank}"
        if worker_exit.kind in CAUSE_OF_EXIT:
            _lose(turn, CAUSE_OF_EXIT[worker_exit.kind], witness, detail, None)
        else:
            if worker_exit.kind is ExitKind.STORAGE_FAILED:
                turn.emit(CheckpointFailed(rank=worker_exit.rank, step=worker_exit.step, message=detail))
                turn.budgets = replace(turn.budgets, grow_not_before=turn.now + 60.0)
            if worker_exit.kind in (ExitKind.USER_ERROR, ExitKind.WORKER_FAULT, ExitKind.ENGINE_ERROR):
                await_same_error(turn)
            else:
                quiesce(turn)
    elif turn.stage is Stage.QUIESCING and worker_exit.kind is ExitKind.SCRIPT_DIED:
        # others have left before because of it: this is what the incident is about
        blame(turn, IncidentCause.SCRIPT_DIED, f"rank {worker_exit.rank}", _words_of(worker_exit), None)
    turn.has_exits = True


def _words_of(worker_exit: WorkerExit) -> str:
    if worker_exit.error is not None:
        return worker_exit.error.message
    cause = CAUSE_OF_EXIT.get(worker_exit.kind)
    return f"rank {worker_exit.rank}: {FAULTS[cause].words}" if cause is not None else str(worker_exit.kind)


def lose_group(turn: Turn, cause: IncidentCause, witness: str, message: str) -> None:
    """Give up the group although none of its workers is known to be gone."""
    _lose(turn, cause, witness, message, None)
    turn.has_exits = True


def leave_out(turn: Turn, workers: Sequence[tuple[Worker, str]]) -> None:
    """Let the group go on without these workers, which are in `run`; each comes with the reason. They are fenced: the
    interrupt reaches them when their node answers again."""
    for worker, message in workers:
        blame(turn, IncidentCause.NODE_UNREACHABLE, "no answer to connects", message, worker)
    quiesce(turn)
    turn.do(*(Interrupt(worker.index, turn.group.generation) for worker, _ in workers))
    turn.has_exits = True


def _lose(turn: Turn, cause: IncidentCause, witness: str, message: str, worker: Worker | None) -> None:
    """Note the fault, and quiesce the lost group."""
    blame(turn, cause, witness, message, worker)
    quiesce(turn)


def quiesce(turn: Turn) -> None:
    """3 QUIESCE: the group is lost, and its workers are made to leave `run`. Interrupt them, unless that was done
    before. Workers report the snapshots that they hold when they leave, and those outside the group are asked for
    theirs."""
    if turn.stage is Stage.QUIESCING:
        return
    _enter(turn)
    interrupt_rest(turn)


def await_same_error(turn: Turn) -> None:
    """Quiesce the group, but interrupt it only after a grace: a slower rank may be about to raise the same error."""
    grace_s = turn.config.timeouts.user_error_grace_s + large_groups.later_s(len(turn.pool.workers))
    _enter(turn, interrupt_at=turn.now + grace_s)


def interrupt_rest(turn: Turn) -> None:
    """Interrupt the workers that are still in `run`."""
    quiescing = turn.current
    assert isinstance(quiescing, Quiescing)
    turn.stay(replace(quiescing, interrupt_at=None, interrupted_at=turn.now))
    turn.do(*(Interrupt(index, turn.group.generation) for index in turn.state.in_run))


def interrupt_acknowledged(turn: Turn, index: int, generation: int) -> None:
    worker = turn.pool.worker(index)
    if worker is not None and turn.stage is Stage.QUIESCING and generation == turn.group.generation:
        turn.pool = turn.pool.with_worker(replace(worker, acknowledged=generation))


def _enter(turn: Turn, *, interrupt_at: float | None = None) -> None:
    switching = turn.current
    durable = switching.durable if isinstance(switching, Switching) else not turn.target.keeps_snapshots
    turn.enter(Quiescing(since=turn.now, interrupt_at=interrupt_at, durable=durable))
    memory_snapshots.ask_others(turn)


_MARGIN_S = 0.25


def nodes_silent(turn: Turn, silent: Mapping[str, str]) -> None:
    """Leave out the workers of nodes that have fallen silent, and take back those of nodes that answer again. `silent`:
    all nodes that are silent now, with the reason."""
    for node_id in sorted({p.info.node_id for p in turn.pool.workers if p.info is not None and p.left_out is not None}):
        if node_id not in silent:
            _take_part_again(turn, node_id)
    in_run: list[tuple[Worker, str]] = []
    for node_id, reason in silent.items():  # all are marked before a group re-forms, which must not take one of them
        workers = [p for p in turn.pool.workers if p.info is not None and p.info.node_id == node_id]
        if any(_is_silent(worker) for worker in workers) or not _polls_are_answered(turn.state, workers, turn.now):
            in_run += _mark(turn, node_id, [worker for worker in workers if not _is_silent(worker)], reason)
    if in_run and turn.state.group_active:
        leave_out(turn, in_run)


def is_left_out_given_up(state: Attempt, left_out: LeftOut, now: float) -> Decision:
    """Whether a worker that is left out is not waited for any longer."""
    timeouts = state.config.timeouts
    if left_out.answers_since is not None:
        waited_s = now - left_out.answers_since
        reason = f"its node answers again, and it did not leave generation {left_out.generation} in {waited_s:.0f} s"
        return Decision(waited_s >= timeouts.left_out_s, reason)
    return Decision(now - left_out.since >= timeouts.left_out_s, f"its node was silent for {timeouts.left_out_s:g} s")


def _mark(turn: Turn, node_id: str, workers: list[Worker], reason: str) -> list[tuple[Worker, str]]:
    """Mark workers of a silent node as left out. Returns those that are in `run`, each with the message of its
    incident."""
    if not workers:
        return []
    state, in_run = turn.state, []
    for worker in workers:
        generation = worker.left_out.generation if worker.left_out is not None else None
        if worker.in_run:
            in_run.append(worker)
            generation = state.group.generation
        left_out = LeftOut(since=turn.now, reason=reason, generation=generation)
        turn.pool = turn.pool.with_worker(replace(worker, in_run=False, left_out=left_out))
    ranks = tuple(rank for worker in in_run if (rank := state.group.rank_of(worker.index)) is not None)
    ip = workers[0].info.node_ip if workers[0].info is not None else ""
    turn.emit(NodeSilent(node_id=node_id, node_ip=ip, workers=len(workers), ranks=ranks, message=reason))
    return [(worker, f"node {node_id[:12]} ({ip}) does not answer: {reason}") for worker in in_run]


def _take_part_again(turn: Turn, node_id: str) -> None:
    incidents.forget_silence(turn, node_id)
    silent_since = []
    for worker in turn.pool.workers:
        if worker.info is None or worker.info.node_id != node_id or worker.left_out is None:
            continue
        left_out = worker.left_out
        if left_out.answers_since is not None:
            continue
        silent_since.append(left_out.since)
        if left_out.generation is None:
            turn.pool = turn.pool.with_worker(replace(worker, left_out=None, unreachable_since=None))
            memory_snapshots.ask_if_useful(turn, worker.index)
        else:
            back = replace(left_out, answers_since=turn.now)
            turn.pool = turn.pool.with_worker(replace(worker, left_out=back, unreachable_since=None))
            turn.do(Interrupt(worker.index, left_out.generation))
    if silent_since:
        turn.emit(NodeAnswers(node_id=node_id, silent_s=turn.now - min(silent_since)))


def fresh_s(num_workers: int) -> float:
    """Seconds within which the answer to a poll shows that a worker's node is there: the worker has missed no poll."""
    return large_groups.poll_wait_s(num_workers) + _MARGIN_S


def _is_silent(worker: Worker) -> bool:
    return worker.left_out is not None and worker.left_out.answers_since is None


def _polls_are_answered(state: Attempt, workers: list[Worker], now: float) -> bool:
    limit_s = fresh_s(len(state.pool.workers))
    return any(now - state.progress.answered_at.get(worker.index, 0.0) < limit_s for worker in workers)
