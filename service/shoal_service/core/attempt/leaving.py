"""Members leave `run`, as planned or by accident: wake the rest, and put an end to those that cannot be woken.

Once nobody is in `run` any more, `judging` says what follows.
"""

from __future__ import annotations

from shoal_service.core.attempt import hangs, holdings, judging, nodes, processes, recall, suspicion
from shoal_service.core.attempt.blame import blame
from shoal_service.core.attempt.commands import Interrupt, KillProcess
from shoal_service.core.attempt.state import Process, Stage
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ExitKind, ShardExit

_SUSPICIONS = {
    ExitKind.COLLECTIVE_FAILED: IncidentCause.COLLECTIVE_FAILED,
    ExitKind.FORM_FAILED: IncidentCause.FORM_FAILED,
    ExitKind.MEMORY_LOST: IncidentCause.MEMORY_LOST,
    ExitKind.DAMAGED_CHECKPOINT: IncidentCause.DAMAGED_CHECKPOINT,
}

_TAKEN = (IncidentCause.SHARD_DIED, IncidentCause.NODE_DIED, IncidentCause.UNREACHABLE)
"""How it looks when a process is taken away that was about to leave."""


def process_lost(turn: Turn, index: int, cause: IncidentCause, witness: str, message: str) -> None:
    """A process is gone. A member that had not left `run` yet takes the whole group down with it; one that had may take
    its part of the last checkpoint with it."""
    if turn.state.process(index) is None:
        return
    process = turn.drop_process(index)
    if cause in _TAKEN and nodes.leave_of(turn.state, process) is not None:
        cause = IncidentCause.PREEMPTED
    turn.emit("worker.lost", shard_id=process.shard_id, rank=turn.state.rank_of(index), cause=cause, message=message)
    suspicion.process_was_lost(turn, process, cause)
    if not process.warm:
        processes.start_died(turn, process, message)
    elif process.in_run and turn.state.group_active:
        recall.note_loss(turn, process, cause)
        _lose(turn, cause, witness, message, process)
        judging.judge_when_all_left(turn)
    elif judging.takes_its_part_along(turn.state, index):
        blame(turn, cause, witness, message, process)
        judging.after_commit(turn)
    elif turn.state.stage is Stage.QUIESCING:
        judging.judge_when_all_left(turn)  # it may have been the last that was asked for its holdings


def evict(turn: Turn, index: int, cause: IncidentCause, witness: str, message: str) -> None:
    """Kill a process that lives, or may live, and treat it as lost."""
    if turn.state.process(index) is not None:
        turn.do(KillProcess(index, message))
        process_lost(turn, index, cause, witness, message)


def run_returned(turn: Turn, index: int, shard_exit: ShardExit) -> None:
    state = turn.state
    if shard_exit.generation != state.generation or state.process(index) is None:
        return  # of a generation that is over
    turn.update_process(index, in_run=False)
    turn.set(exits={**state.exits, index: shard_exit}, step=max(state.step, shard_exit.step))
    if shard_exit.kind in judging.PLANNED:
        if turn.state.stage in (Stage.FORMING, Stage.RUNNING):
            turn.enter(Stage.SWITCHING)  # the others are about to leave as well, or run into the deadline
    elif turn.state.stage is not Stage.QUIESCING and turn.state.group_active:
        detail = shard_exit.error.message if shard_exit.error else str(shard_exit.kind)
        witness = f"rank {shard_exit.rank}"
        if shard_exit.kind in _SUSPICIONS:
            _lose(turn, _SUSPICIONS[shard_exit.kind], witness, detail, None)
        else:
            if shard_exit.kind is ExitKind.STORAGE_FAILED:
                turn.emit("checkpoint.failed", rank=shard_exit.rank, step=shard_exit.step, message=detail)
                turn.set(grow_not_before=turn.now + 60.0)
            if shard_exit.kind is ExitKind.USER_ERROR:
                _hear_the_others(turn)
            else:
                _quiesce(turn)
    judging.judge_when_all_left(turn)


def lose_group(turn: Turn, cause: IncidentCause, witness: str, message: str) -> None:
    """The group is given up although no member is known to be gone."""
    _lose(turn, cause, witness, message, None)
    judging.judge_when_all_left(turn)


def interrupt_heard(turn: Turn, index: int, generation: int) -> None:
    if turn.state.stage is Stage.QUIESCING and generation == turn.state.generation and index not in turn.state.heard:
        turn.set(heard=(*turn.state.heard, index))


def give_up_on_the_unresponsive(turn: Turn) -> None:
    """In QUIESCING: who does not answer is killed and replaced, and who cannot be woken within the deadline, too."""
    state = turn.state
    if state.interrupted_at is None:
        return
    waited, timeouts = turn.now - state.interrupted_at, state.timeouts
    hung = state.incident is not None and state.incident.cause is IncidentCause.HUNG
    silent = hangs.silent(state, turn.now) if hung else frozenset()
    for index in state.in_run:
        process = state.process(index)
        assert process is not None
        if process.unreachable_since is not None:
            message = f"it does not answer, and generation {state.generation} broke"
            evict(turn, index, IncidentCause.UNREACHABLE, "no answer", message)
        elif index in silent and index not in state.heard:
            message = f"left every poll of {timeouts.silent_s:g} s and more unanswered"
            evict(turn, index, IncidentCause.HUNG, "no answer", message)
        elif index not in state.heard and waited >= timeouts.unresponsive_s:
            message = f"did not hear within {timeouts.unresponsive_s:g} s that generation {state.generation} is over"
            evict(turn, index, IncidentCause.HUNG if hung else IncidentCause.STUCK, "deadline", message)
        elif waited >= timeouts.quiesce_s:
            message = f"did not leave generation {state.generation} within {timeouts.quiesce_s:g} s"
            evict(turn, index, IncidentCause.HUNG if hung else IncidentCause.STUCK, "deadline", message)


def interrupt_rest(turn: Turn) -> None:
    """Wake those that have not left `run` by themselves."""
    turn.set(interrupt_at=None, interrupted_at=turn.now)
    turn.do(*(Interrupt(index, turn.state.generation) for index in turn.state.in_run))
    give_up_on_the_unresponsive(turn)


def _lose(turn: Turn, cause: IncidentCause, witness: str, message: str, process: Process | None) -> None:
    """The group is lost: from now on it is quiescing."""
    blame(turn, cause, witness, message, process)
    _quiesce(turn)


def _quiesce(turn: Turn) -> None:
    if turn.state.stage is Stage.QUIESCING:
        return
    _enter_quiescing(turn)
    interrupt_rest(turn)


def _hear_the_others(turn: Turn) -> None:
    """A rank that is a little slower is about to raise the same: once it is interrupted, nobody would know."""
    _enter_quiescing(turn)
    turn.set(interrupt_at=turn.now + turn.state.timeouts.user_error_grace_s)


def _enter_quiescing(turn: Turn) -> None:
    turn.enter(Stage.QUIESCING)
    turn.set(interrupt_at=None, interrupted_at=None, heard=())
    holdings.ask_the_others(turn)
