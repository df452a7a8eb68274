"""1 LOSS and 3 QUIESCE: what is wrong with workers and nodes. A lost worker is taken out of the pool, and what its loss
says about its node, its memory and its code is noted. If its group is lost with it, the other workers are interrupted.

    a worker is lost        its process died, or it is evicted: a crash, lack of memory, a node that Ray declared dead
    a worker left `run`     as planned, or with an error: the others are interrupted
    a node is silent        its workers are left out, and take part again when it answers; that a node is dead is Ray's
                            verdict, which is not taken back

`incidents` keeps what happened. What follows is decided by `outcome`, when no worker is in `run`.

How a process ended may become known some time after its death:

    SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV    a fault of native code that the task runs, or of the machine
    other signals but SIGKILL and SIGTERM       of the task: an alarm, a limit of time
    an exit status                              `os._exit` or C's `exit` in the task or a library: Shoal's workers leave
                                                `run` and are killed, and never end themselves
    three groups in a row, the same place       the task's: each time other processes have ended there
    killed for lack of memory                   from then on no new worker of the attempt touches memory before it is
                                                needed; the death does not count against its node

A worker that waits for its first group touches the memory that the planner expects it to use, so that its first step is
fast. Where memory is short that may be what kills it, or its neighbour, again and again.

The job starts no worker on a suspected node until the node passes a test; the control plane decides if other jobs avoid
it as well. The column `probation` of the table of faults says for which causes. While another worker of the job answers
from the node, the worker is at fault and not the node. A node is never suspected if no worker answers from another
one: a job on a doubtful node makes progress, a job without a node does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from shoal_service.core.attempt import checkpoints, forming, incidents, memory_snapshots, placement
from shoal_service.core.attempt.faults import CAUSE_BY_EXIT, FAULTS, Memory, Probation
from shoal_service.core.attempt.messages import Interrupt, KillWorker, SuspectNode
from shoal_service.core.attempt.scripts import CRASH
from shoal_service.core.attempt.state import (
    Attempt,
    Crash,
    Death,
    LeftOut,
    NodeLoss,
    Quiescing,
    Stage,
    Switching,
    Worker,
    poll_wait_s,
)
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.events import CheckpointFailed, NodeAnswers, NodeSilent, WarmMemoryOff, WorkerLost
from shoal_service.core.quantities import count_text, ranks_text
from shoal_workers.contract import EndReason, ExitKind, IncidentCause, UserFailure, WorkerExit

_MARGIN_S = 0.25
_MAY_BE_RAISED_BY_OTHERS = (ExitKind.USER_ERROR, ExitKind.WORKER_FAULT, ExitKind.ENGINE_ERROR)


def handle_lost_worker(turn: Turn, worker: Worker, cause: IncidentCause, witness: str, message: str) -> None:
    """Note that a worker is gone. If it had not left `run`, its group is lost. If it had, its part of the last
    checkpoint may be lost."""
    index = worker.index
    turn.drop_worker(index)
    _note_death(turn, worker, cause)
    incidents.note_dead_silent_node(turn, worker, cause, message)
    leave = placement.find_leave(turn.state, worker)
    if FAULTS[cause].is_preemption_after_notice and leave is not None and not leave.is_suspected:
        cause = IncidentCause.PREEMPTED
    turn.emit(WorkerLost(worker_id=worker.worker_id, rank=turn.group.rank_of(index), cause=cause, message=message))
    incidents.distrust_memory(turn, cause)
    if is_out_of_memory(message):
        _note_lack_of_memory(turn, worker.worker_id, message)
    else:
        _count_against_node(turn, worker, cause)
    if worker.only_on and not worker.warm and FAULTS[cause].memory is Memory.LOST:
        memory_snapshots.forget_node(turn, worker.only_on)  # no fault of the worker's start
    elif not worker.warm:
        forming.handle_death_at_start(turn, worker, message)
    elif worker.in_run and turn.state.group_active:
        memory_snapshots.note_lost_worker(turn, worker, cause)
        incidents.blame(turn, cause, witness, message, worker)
        quiesce(turn)
    elif checkpoints.is_part_missing(turn.state, index):
        memory_snapshots.note_lost_worker(turn, worker, cause)
        incidents.blame(turn, cause, witness, message, worker)


def evict(turn: Turn, index: int, cause: IncidentCause, witness: str, message: str) -> None:
    """Kill a worker that is alive, or may be, and treat it as lost."""
    worker = turn.pool.worker(index)
    if worker is not None:
        turn.do(KillWorker(index, message))
        handle_lost_worker(turn, worker, cause, witness, message)


def replace_faulty(turn: Turn, index: int, cause: IncidentCause, witness: str, message: str) -> None:
    """Kill a worker that has left `run` with an error that the others have not raised."""
    incidents.blame(turn, cause, witness, message, turn.pool.worker(index))
    turn.do(KillWorker(index, message))
    worker = turn.drop_worker(index)
    turn.emit(WorkerLost(worker_id=worker.worker_id, rank=turn.group.rank_of(index), cause=cause, message=message))
    memory_snapshots.note_lost_worker(turn, worker, cause)
    _count_against_node(turn, worker, cause)


def lose_group(turn: Turn, cause: IncidentCause, witness: str, message: str) -> None:
    """Give up the group although none of its workers is known to be gone."""
    incidents.blame(turn, cause, witness, message, None)
    quiesce(turn)


def handle_exit(turn: Turn, worker: Worker, worker_exit: WorkerExit) -> None:
    """Note how a worker has left `run`. If that was not planned, its group is lost."""
    index, is_current = worker.index, worker_exit.generation == turn.group.generation
    if worker.left_out is not None and worker.left_out.generation == worker_exit.generation:
        worker = replace(worker, left_out=None)  # it answers, and has left
        turn.pool = turn.pool.with_worker(worker)
        if not is_current:
            memory_snapshots.ask_if_useful(turn, index)
    if not is_current:
        return  # of a generation that is over
    turn.pool = turn.pool.with_worker(replace(worker, in_run=False))
    turn.group = replace(turn.group, exits=turn.group.exits.with_item(index, worker_exit))
    turn.progress = replace(turn.progress, step=max(turn.progress.step, worker_exit.step))
    if worker_exit.saved_part is not None:
        checkpoints.keep_part(turn, worker_exit.saved_part)
    if isinstance(turn.current, Quiescing):
        turn.set_stage(replace(turn.current, left_at=turn.now))
    if worker_exit.is_planned and turn.stage in (Stage.FORMING, Stage.RUNNING):
        # not requested: the others are about to leave as well, or exceed the deadline
        turn.enter(Switching(since=turn.now, durable=not turn.target.keeps_snapshots))
    elif not worker_exit.is_planned:
        _left_with_error(turn, worker_exit)


def _left_with_error(turn: Turn, worker_exit: WorkerExit) -> None:
    kind, message, witness = worker_exit.kind, _describe_exit(worker_exit), f"rank {worker_exit.rank}"
    if isinstance(turn.current, Quiescing):
        if kind is ExitKind.SCRIPT_DIED:  # others have left before because of it: this is what the incident is about
            incidents.blame(turn, IncidentCause.SCRIPT_DIED, witness, message, None)
        if kind in _MAY_BE_RAISED_BY_OTHERS and turn.current.interrupt_at is not None:
            turn.set_stage(replace(turn.current, interrupt_at=_grace_until(turn.state, turn.current.since, turn.now)))
    elif turn.state.group_active:
        if kind in CAUSE_BY_EXIT:
            incidents.blame(turn, CAUSE_BY_EXIT[kind], witness, message, None)
        if kind is ExitKind.STORAGE_FAILED and not checkpoints.reads_storage(turn.state):
            turn.emit(CheckpointFailed(rank=worker_exit.rank, step=worker_exit.step, message=message))
            turn.budgets = replace(turn.budgets, grow_not_before=turn.now + 60.0)
        quiesce(turn, awaits_same_error=kind in _MAY_BE_RAISED_BY_OTHERS)


def _grace_until(state: Attempt, since: float, now: float) -> float:
    """Until when other ranks may raise the same error: each that does gives the next ones user_error_grace_s again.

    So an error of one rank costs as little in a large group as in a small one, and one of all ranks is seen on all of
    them, as long as their answers may take."""
    grace_s = state.config.timeouts.user_error_grace_s
    return min(now, since + state.config.timeouts.later_s(len(state.pool.workers))) + grace_s


def _describe_exit(worker_exit: WorkerExit) -> str:
    if worker_exit.error is not None:
        return worker_exit.error.message
    cause = CAUSE_BY_EXIT.get(worker_exit.kind)
    return f"rank {worker_exit.rank}: {FAULTS[cause].description}" if cause is not None else str(worker_exit.kind)


def quiesce(turn: Turn, *, awaits_same_error: bool = False) -> None:
    """3 QUIESCE: the group is lost, and its workers are made to leave `run`, if that was not done before.

    They are interrupted at once, or after a grace if a slower rank may be about to raise the same error. They report
    the snapshots that they hold when they leave; workers outside the group are asked for theirs."""
    if turn.stage is Stage.QUIESCING:
        return
    switching = turn.current
    durable = switching.durable if isinstance(switching, Switching) else not turn.target.keeps_snapshots
    interrupt_at = _grace_until(turn.state, turn.now, turn.now) if awaits_same_error else None
    turn.enter(Quiescing(since=turn.now, interrupt_at=interrupt_at, durable=durable))
    memory_snapshots.ask_others(turn)
    if not awaits_same_error:
        interrupt_rest(turn)


def interrupt_rest(turn: Turn) -> None:
    """Interrupt the workers that are still in `run`."""
    quiescing = turn.current
    assert isinstance(quiescing, Quiescing)
    turn.set_stage(replace(quiescing, interrupt_at=None, interrupted_at=turn.now))
    turn.do(*(Interrupt(index, turn.group.generation) for index in turn.state.in_run))


def note_acknowledgement(turn: Turn, worker: Worker, generation: int) -> None:
    if turn.stage is Stage.QUIESCING and generation == turn.group.generation:
        turn.pool = turn.pool.with_worker(replace(worker, acknowledged=generation))


def handle_silent_nodes(turn: Turn, silent: Mapping[str, str]) -> None:
    """Leave out the workers of nodes that do not answer any longer, and take back those of nodes that answer again.

    The group goes on without workers that are in `run`. They are fenced: the interrupt reaches them when their node
    answers again. `silent`: all nodes that do not answer now, with the reason.
    """
    for node_id in sorted({worker.node_id for worker in turn.pool.workers if worker.left_out is not None}):
        if node_id not in silent:
            _take_part_again(turn, node_id)
    in_run: list[tuple[Worker, str]] = []
    for node_id, reason in silent.items():  # all are marked before a group re-forms, which must not take one of them
        workers = [worker for worker in turn.pool.workers if worker.node_id == node_id]
        is_known = any(worker.is_node_silent for worker in workers)
        if is_known or not _polls_are_answered(turn.state, workers, turn.now):
            in_run += _leave_out(turn, node_id, [worker for worker in workers if not worker.is_node_silent], reason)
    if in_run and turn.state.group_active:
        for worker, message in in_run:
            incidents.blame(turn, IncidentCause.NODE_UNREACHABLE, "no answer to connects", message, worker)
        quiesce(turn)
        turn.do(*(Interrupt(worker.index, turn.group.generation) for worker, _ in in_run))


def _leave_out(turn: Turn, node_id: str, workers: list[Worker], reason: str) -> list[tuple[Worker, str]]:
    """Mark workers of a silent node as left out. Return those that are in `run`, each with the message of its
    incident."""
    if not workers:
        return []
    in_run = [worker for worker in workers if worker.in_run]
    for worker in workers:
        generation = worker.left_out.generation if worker.left_out is not None else None
        left_out = LeftOut(
            since=turn.now, reason=reason, generation=turn.group.generation if worker.in_run else generation
        )
        turn.pool = turn.pool.with_worker(replace(worker, in_run=False, left_out=left_out))
    ranks = tuple(rank for worker in in_run if (rank := turn.group.rank_of(worker.index)) is not None)
    ip = workers[0].info.node_ip if workers[0].info is not None else ""
    turn.emit(NodeSilent(node_id=node_id, node_ip=ip, workers=len(workers), ranks=ranks, message=reason))
    return [(worker, f"node {node_id[:12]} ({ip}) does not answer: {reason}") for worker in in_run]


def _take_part_again(turn: Turn, node_id: str) -> None:
    incidents.forget_silence(turn, node_id)
    silent_since = []
    for worker in turn.pool.workers:
        left_out = worker.left_out
        if worker.node_id != node_id or left_out is None or not worker.is_node_silent:
            continue
        silent_since.append(left_out.since)
        if left_out.generation is None:
            turn.pool = turn.pool.with_worker(replace(worker, left_out=None, unreachable_since=None))
            memory_snapshots.ask_if_useful(turn, worker.index)
        else:
            leaving = replace(left_out, answers_since=turn.now)
            turn.pool = turn.pool.with_worker(replace(worker, left_out=leaving, unreachable_since=None))
            turn.do(Interrupt(worker.index, left_out.generation))
    if silent_since:
        turn.emit(NodeAnswers(node_id=node_id, silent_s=turn.now - min(silent_since)))


def fresh_s(num_workers: int) -> float:
    """Seconds within which the answer to a poll shows that a worker's node is there: the worker has missed no poll."""
    return poll_wait_s(num_workers) + _MARGIN_S


def _polls_are_answered(state: Attempt, workers: list[Worker], now: float) -> bool:
    limit_s = fresh_s(len(state.pool.workers))
    return any(now - state.progress.answered_at.get(worker.index, 0.0) < limit_s for worker in workers)


# How processes ended: crashes at the same place, and lack of memory

TIMES = 3
_KEPT_DEATHS = 64
_CRASH = re.compile(
    r"\b(?:was )?(killed by (?:signal (?!9\b|15\b)\d+\b.*|the kernel: out of memory)|exited with -?\d+)$"
)
"""Ends of the task's own. Who sends SIGKILL and SIGTERM is not known."""
_EXIT, _NO_MEMORY = "exited with", "killed by the kernel"
PROCESS_EXIT, NO_MEMORY = "process_exit", "no_memory"
"""Values of `UserFailure.mistake`, as CRASH."""
_OUT_OF_MEMORY = ("out of memory", "out-of-memory", "running low on memory", "oom-kill", "outofmemory")
"""Texts by which the kernel and Ray's memory monitor report a lack of memory, in lower case."""


def handle_explained_death(turn: Turn, worker_id: str, message: str) -> None:
    """Act on the exit status of a worker, which may become known some time after the death. The third crash in a row at
    one place ends the attempt."""
    if is_out_of_memory(message):
        _note_lack_of_memory(turn, worker_id, message)
    incidents.explain_death(turn, worker_id, message)
    ended = _CRASH.search(message)
    death = next((death for death in turn.health.deaths if death.worker_id == worker_id), None)
    if ended is None or death is None:
        return
    crash = _add_crash(turn.health.crash, death, ended[1])
    others = tuple(other for other in turn.health.deaths if other is not death)
    turn.health = replace(turn.health, deaths=others, crash=crash)
    if crash.times >= TIMES:
        mistake, advice = CRASH, "look at the native code that is called there"
        if crash.words.startswith(_EXIT):
            mistake, advice = PROCESS_EXIT, "look for os._exit in the task and in the libraries that it calls"
        elif crash.words.startswith(_NO_MEMORY):
            mistake, advice = NO_MEMORY, "lower batch.micro_size, or give the workers more memory"
        sentence = f"{describe_crash(crash)}, on rank {death.rank}; run `shoal check`, and {advice}."
        failure = UserFailure(
            type=mistake,
            message=sentence,
            traceback="",
            phase="",
            ranks=(death.rank,),
            step=crash.step,
            mistake=mistake,
        )
        turn.end(EndReason.USER_ERROR, sentence, failure)


def describe_crash(crash: Crash) -> str:
    """Describe the crash: `killed by signal 11 (SIGSEGV) in validation after step 20, 3 times in a row at the same
    place`."""
    times = "once" if crash.times == 1 else f"{count_text(crash.times, 'time')} in a row at the same place"
    what, comma, line = crash.words.partition(", at ")
    return f"{what} after step {crash.step}{comma}{line}, {times}"


def describe_last_loss(state: Attempt) -> str:
    """Say how the group ended: by the crash that it has just had, if its exit status is known; otherwise by what the
    incident says."""
    crash = state.health.crash
    if crash is not None and state.group.generation - crash.generation <= 1:
        return describe_crash(crash)
    if state.incident is None:
        return "unknown"
    ranks = f"{ranks_text(state.incident.ranks)}: " if state.incident.ranks else ""
    return ranks + state.incident.message


def is_out_of_memory(message: str) -> bool:
    return any(text in message.lower() for text in _OUT_OF_MEMORY)


def _note_death(turn: Turn, worker: Worker, cause: IncidentCause) -> None:
    """Note the death of a worker with its group and step, because its exit status becomes known later."""
    rank = turn.group.rank_of(worker.index)
    if cause is IncidentCause.WORKER_DIED and rank is not None:
        generation, step = turn.group.generation, turn.progress.furthest_step
        death = Death(worker_id=worker.worker_id, rank=rank, generation=generation, step=step)
        turn.health = replace(turn.health, deaths=(*turn.health.deaths, death)[-_KEPT_DEATHS:])


def _add_crash(last: Crash | None, death: Death, place: str) -> Crash:
    """Return the crash record after this death. Two ranks of one group that crash count once."""
    # + 1: a step may be completed whose report was lost with the worker.
    if last is None or last.words != place or death.step > last.step + 1:
        return Crash(words=place, step=death.step, generation=death.generation)
    newest = max(last.generation, death.generation)
    return replace(last, generation=newest, times=last.times + (death.generation > last.generation))


def _note_lack_of_memory(turn: Turn, worker_id: str, message: str) -> None:
    """Note that a worker was killed for lack of memory: its node is full, which says nothing against the node. The
    event is emitted once per attempt."""
    losses = tuple(loss for loss in turn.health.losses if loss.worker_id != worker_id)
    was_scarce = turn.health.is_memory_scarce
    turn.health = replace(turn.health, losses=losses, is_memory_scarce=True)
    if not was_scarce:
        turn.emit(WarmMemoryOff(worker_id=worker_id, message=message))


# Suspected nodes

REPEATED = 3
"""A node is suspected if it loses this many workers within WINDOW_S, and every other node has lost at most a third as
many."""
WINDOW_S = 600.0
"""Lost workers of a node are counted together if they were lost within this time."""
_ONCE_S = 60.0
"""Losses of a node within this time are one suspicion, because a node that fails loses its workers one after the
other."""


def _count_against_node(turn: Turn, worker: Worker, cause: IncidentCause) -> None:
    """Count a worker that is gone from the state against its node, and suspect the node if it is due."""
    node_id = worker.node_id
    if not node_id or FAULTS[cause].probation is Probation.NEVER:
        return
    recent = tuple(loss for loss in turn.health.losses if turn.now - loss.at < WINDOW_S)
    loss = NodeLoss(node_id=node_id, at=turn.now, worker_id=worker.worker_id)
    turn.health = replace(turn.health, losses=(*recent, loss))
    if decision := _is_suspect(turn.state, node_id, cause):
        suspect(turn, node_id, decision.reason)


def suspect(turn: Turn, node_id: str, reason: str) -> None:
    last = turn.health.suspected.get(node_id)
    if last is None or turn.now - last > _ONCE_S:
        turn.health = replace(
            turn.health,
            suspected={**turn.health.suspected, node_id: turn.now},
            losses=tuple(loss for loss in turn.health.losses if loss.node_id != node_id),
        )
        turn.do(SuspectNode(node_id, reason))


def is_alone(state: Attempt, node_id: str, *, besides: int | None = None) -> bool:
    """True if no worker (`besides` this one) answers from the node while one answers from another node."""
    nodes = {worker.node_id for worker in state.pool.usable if worker.index != besides}
    return bool(nodes) and node_id not in nodes


def _is_suspect(state: Attempt, node_id: str, cause: IncidentCause) -> Decision:
    """Decide if the node is suspected now that it has lost a worker for this cause."""
    fault = FAULTS[cause]
    if fault.probation is Probation.ALWAYS:
        return Decision(True, fault.description)
    if fault.probation is Probation.ALONE and is_alone(state, node_id):
        return Decision(True, f"{fault.description}; no other worker answers from there")
    lost = Counter(loss.node_id for loss in state.health.losses)
    elsewhere = {worker.node_id for worker in state.pool.usable} - {node_id}
    most = max((lost[node] for node in elsewhere), default=0)
    is_repeated = bool(elsewhere) and lost[node_id] >= REPEATED and 3 * most <= lost[node_id]
    reason = (
        f"{count_text(lost[node_id], 'worker')} lost within {WINDOW_S / 60:.0f} minutes, and at most {most} on any "
        "other node"
    )
    return Decision(is_repeated, reason)
