"""Which processes exist: starting, warming, replacing and dropping them. Ranks are `forming`'s business."""

from __future__ import annotations

from shoal_service.core.attempt.commands import StartProcess
from shoal_service.core.attempt.state import Process, Stage
from shoal_service.core.attempt.turn import Turn
from shoal_service.views import UserFailure
from shoal_workers.contract.ids import shard_name
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import ErrorReport, ShardInfo

_REPLENISHING = (Stage.STARTING, Stage.WAITING, Stage.RUNNING)
"""Not while a group re-forms, nor before its first step: a starting process would slow the survivors down."""


def warm(turn: Turn, index: int, info: ShardInfo) -> None:
    if turn.state.process(index) is None:
        return
    turn.update_process(index, info=info, warm_at=turn.now)
    turn.set(failed_starts=0)
    turn.emit("worker.started", shard_id=info.shard_id, node_id=info.node_id, node_ip=info.node_ip, pid=info.pid)


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


def replenish(turn: Turn) -> None:
    """Start what is missing to the target; drop what is beyond it, newest first, never a member."""
    state = turn.state
    if state.stage not in _REPLENISHING or (state.failed_starts and turn.now < state.grow_not_before):
        return
    if state.stage is Stage.RUNNING and state.incident is not None:
        return
    for _ in range(state.target_processes - len(state.processes)):
        index = turn.state.next_index
        process = Process(index=index, shard_id=shard_name(state.job_id, state.attempt, index), started_at=turn.now)
        turn.set(processes=(*turn.state.processes, process), next_index=index + 1)
        turn.do(StartProcess(index, process.shard_id))
    surplus = max(0, len(turn.state.processes) - state.target_processes)
    members = state.members if state.group_active else ()  # one that has left `run` may still have news to tell
    spare = [p for p in turn.state.processes if not p.in_run and p.index not in members]
    for process in sorted(spare, key=lambda p: (p.warm, -p.index))[:surplus]:
        turn.emit("worker.released", shard_id=process.shard_id)
        turn.kill(process.index, "more processes than granted")
