"""Which processes exist: starting, warming, replacing and dropping them. Ranks are `forming`'s business."""

from __future__ import annotations

from shoal_service.core.attempt import holdings, nodes, recall
from shoal_service.core.attempt.commands import StartProcess
from shoal_service.core.attempt.state import Attempt, AvoidedNode, Process, Stage
from shoal_service.core.attempt.turn import Turn
from shoal_service.views import UserFailure
from shoal_workers.contract.ids import shard_name
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import ErrorReport, LeaveNotice, ShardInfo

_REPLENISHING = (Stage.STARTING, Stage.WAITING, Stage.RUNNING)
"""Not while a group re-forms, nor before its first step: a starting process would slow the survivors down."""


def warm(turn: Turn, index: int, info: ShardInfo) -> None:
    if turn.state.process(index) is None:
        return
    turn.update_process(index, info=info, warm_at=turn.now)
    turn.set(failed_starts=0)
    turn.emit("worker.started", shard_id=info.shard_id, node_id=info.node_id, node_ip=info.node_ip, pid=info.pid)
    if turn.state.stage in (Stage.QUIESCING, Stage.WAITING):
        holdings.ask(turn, index)  # memory outlives processes: it may serve what those before it on its node left


def unreachable(turn: Turn, index: int) -> None:
    """By itself no verdict: it may be a moment, and Ray may be about to know better."""
    process = turn.state.process(index)
    if process is not None and process.warm and process.unreachable_since is None:
        turn.update_process(index, unreachable_since=turn.now)


def answered(turn: Turn, index: int) -> None:
    """It was only a moment."""
    process = turn.state.process(index)
    if process is not None and process.unreachable_since is not None:
        turn.update_process(index, unreachable_since=None)


def failed_to_start(turn: Turn, index: int, error: ErrorReport) -> None:
    """The task cannot be loaded: before the first group this is the job's failure, later only the newcomer's."""
    process = turn.state.process(index)
    if process is None:
        return
    if not turn.state.formed_once:
        failure = UserFailure(
            type=error.type, message=error.message, traceback=error.traceback, phase=error.phase, ranks=(), step=0
        )
        turn.end(EndReason.USER_ERROR, f"{error.type}: {error.message}", failure)
        return
    turn.emit("worker.start_failed", shard_id=process.shard_id, error=f"{error.type}: {error.message}")
    turn.kill(index, "the task could not be loaded in it")
    turn.set(failed_starts=turn.state.failed_starts + 1, grow_not_before=turn.now + 30.0)


def start_died(turn: Turn, process: Process, message: str) -> None:
    """A process died before it was warm. Too many in a row, with nothing running, is the end; beside a running group
    the next one is tried later and later."""
    turn.set(failed_starts=turn.state.failed_starts + 1)
    if turn.state.stage is Stage.RUNNING:
        turn.set(grow_not_before=turn.now + min(60.0, 2.0**turn.state.failed_starts))
    limit = 3 * max(1, turn.state.granted)
    if turn.state.failed_starts >= limit and turn.state.stage in (Stage.STARTING, Stage.WAITING):
        turn.end(
            EndReason.START_FAILED,
            f"{turn.state.failed_starts} worker processes in a row died while starting; the last one: {message}",
        )


def about_to_leave(turn: Turn, index: int, notice: LeaveNotice) -> None:
    """SIGTERM, or a preemption notice: the process, not its node, will be gone soon."""
    process = turn.state.process(index)
    if process is None or process.info is None or process.leave is not None:
        return
    deadline = turn.now + notice.grace_s
    leave = AvoidedNode(node_id=process.info.node_id, reason=notice.reason, deadline=deadline)
    turn.update_process(index, leave=leave)
    turn.emit(
        "worker.leaving", shard_id=process.shard_id, rank=turn.state.rank_of(index), reason=notice.reason,
        grace_s=notice.grace_s,
    )  # fmt: skip


def replenish(turn: Turn) -> None:
    """Start what is missing to the target; drop what has to go, and what is beyond the target, newest first, never a
    member."""
    state = turn.state
    if state.stage not in _REPLENISHING or (state.stage is Stage.RUNNING and state.incident is not None):
        return
    if not state.failed_starts or turn.now >= state.grow_not_before:
        _start_missing(turn)
    if state.stage is Stage.RUNNING and state.memory is not None and state.step == state.start_step:
        return  # until the new group has a snapshot of its own, those that leave may be needed to serve the old one
    _drop_leavers(turn)
    _drop_surplus(turn)


def _drop_leavers(turn: Turn) -> None:
    """The group runs without them. While it waits they may serve what lies in their memory, until they are due."""
    state = turn.state
    for process in _spare(state):
        leave = nodes.leave_of(state, process)
        if leave is None and process.slow_until is None:
            continue
        if state.stage is not Stage.WAITING or nodes.is_due(state, process, turn.now):
            reason = leave.reason if leave is not None else "it computed too slowly for the others"
            turn.emit("worker.released", shard_id=process.shard_id, reason=reason)
            turn.kill(process.index, reason)


def _start_missing(turn: Turn) -> None:
    state = turn.state
    slow = {p.info.node_id for p in state.processes if p.info is not None and p.slow_until is not None}
    avoided = tuple(sorted({node.node_id for node in state.avoided} | slow))
    for _ in range(state.target_processes - len(_staying(state))):
        index = turn.state.next_index
        shard_id = shard_name(state.job_id, state.attempt, index)
        only_on = recall.next_node(turn.state)
        process = Process(index=index, shard_id=shard_id, started_at=turn.now, avoids=avoided, only_on=only_on)
        turn.set(processes=(*turn.state.processes, process), next_index=index + 1)
        turn.do(StartProcess(index, process.shard_id, avoided, only_on))


def _drop_surplus(turn: Turn) -> None:
    state = turn.state
    staying = _staying(state)
    surplus = max(0, len(staying) - state.target_processes)
    spare = [p for p in _spare(state) if p in staying]
    for process in sorted(spare, key=lambda p: (p.warm, p.index in state.members, -p.index))[:surplus]:
        reason = "more processes than granted"
        turn.emit("worker.released", shard_id=process.shard_id, reason=reason)
        turn.kill(process.index, reason)


def _staying(state: Attempt) -> list[Process]:
    """Those that count: others are to be replaced."""
    return [p for p in state.processes if p.slow_until is None and nodes.leave_of(state, p) is None]


def _spare(state: Attempt) -> list[Process]:
    """In no group. One that has left `run` may still have news to tell."""
    members = state.members if state.group_active else ()
    return [p for p in state.processes if not p.in_run and p.index not in members]
