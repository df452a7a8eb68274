"""Members leave `run`, as planned or by accident: quiesce the rest, judge how the group ended, decide what follows."""

from __future__ import annotations

from shoal_service.core.attempt import forming, processes
from shoal_service.core.attempt.commands import FindCheckpoint, ForgetDamaged, Interrupt, KillProcess
from shoal_service.core.attempt.state import Attempt, Incident, Process, Stage, Wanted
from shoal_service.core.attempt.turn import Turn
from shoal_service.views import UserFailure
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind, ShardExit

_FRUITLESS_LIMIT = 6
_PLANNED = (ExitKind.FINISHED, ExitKind.YIELDED)
_SUSPICIONS = {
    ExitKind.COLLECTIVE_FAILED: IncidentCause.COLLECTIVE_FAILED,
    ExitKind.FORM_FAILED: IncidentCause.FORM_FAILED,
    ExitKind.DAMAGED_CHECKPOINT: IncidentCause.DAMAGED_CHECKPOINT,
}


def process_lost(turn: Turn, index: int, cause: IncidentCause, witness: str, message: str) -> None:
    """A process is gone. A member that had not left `run` yet takes the whole group down with it; one that had may take
    its part of the last checkpoint with it."""
    if turn.state.process(index) is None:
        return
    process = turn.drop_process(index)
    turn.emit("worker.lost", shard_id=process.shard_id, rank=turn.state.rank_of(index), cause=cause, message=message)
    if not process.warm:
        processes.start_died(turn, process, message)
    elif process.in_run and turn.state.group_active:
        _lose(turn, cause, witness, message, process)
        judge_when_all_left(turn)
    elif _takes_its_part_along(turn.state, index):
        _blame(turn, cause, witness, message, process)
        after_commit(turn)


def run_returned(turn: Turn, index: int, shard_exit: ShardExit) -> None:
    state = turn.state
    if shard_exit.generation != state.generation or state.process(index) is None:
        return  # of a generation that is over
    turn.update_process(index, in_run=False)
    turn.set(exits={**state.exits, index: shard_exit}, step=max(state.step, shard_exit.step))
    if shard_exit.kind not in _PLANNED and turn.state.stage is not Stage.QUIESCING and turn.state.group_active:
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
    judge_when_all_left(turn)


def lose_group(turn: Turn, cause: IncidentCause, witness: str, message: str) -> None:
    """The group is given up although no member is known to be gone."""
    _lose(turn, cause, witness, message, None)
    judge_when_all_left(turn)


def evict_stuck(turn: Turn) -> None:
    """Survivors that could not be woken within the deadline are killed and replaced."""
    for index in _still_in_run(turn):
        process = turn.drop_process(index)
        message = f"did not leave generation {turn.state.generation} within {turn.state.timeouts.quiesce_s:.0f} s"
        turn.emit(
            "worker.lost",
            shard_id=process.shard_id,
            rank=turn.state.rank_of(index),
            cause=IncidentCause.STUCK,
            message=message,
        )
        turn.do(KillProcess(index, message))
        _lose(turn, IncidentCause.STUCK, "deadline", message, process)
    judge_when_all_left(turn)


def judge_when_all_left(turn: Turn) -> None:
    """Once no member is in `run` any more, how they left says what follows."""
    state = turn.state
    if not state.group_active or _still_in_run(turn):
        return
    exits = list(state.exits.values())
    by_kind = {kind: [e for e in exits if e.kind is kind] for kind in ExitKind}
    if by_kind[ExitKind.USER_ERROR]:
        failure = _grouped(by_kind[ExitKind.USER_ERROR])
        turn.end(EndReason.USER_ERROR, f"{failure.type}: {failure.message}", failure)
    elif by_kind[ExitKind.NON_FINITE]:
        worst = by_kind[ExitKind.NON_FINITE][0]
        detail = worst.error.message if worst.error else "loss or gradient norm is not finite"
        turn.end(EndReason.NON_FINITE, f"step {worst.step + 1}: {detail}")
    elif by_kind[ExitKind.DAMAGED_CHECKPOINT]:
        _fall_back(turn, by_kind[ExitKind.DAMAGED_CHECKPOINT][0])
    elif len(exits) == len(state.members) and len({(e.kind, e.step) for e in exits}) == 1 and exits[0].kind in _PLANNED:
        turn.enter(Stage.COMMITTING)
        after_commit(turn)
    elif by_kind[ExitKind.STORAGE_FAILED] and (
        state.fruitless >= 3 or by_kind[ExitKind.STORAGE_FAILED][0].step == state.total_steps
    ):
        failed = by_kind[ExitKind.STORAGE_FAILED][0]
        turn.end(EndReason.STORAGE_FAILED, failed.error.message if failed.error else "storage failed")
    else:
        _re_form(turn)


def after_commit(turn: Turn) -> None:
    """In COMMITTING: once the checkpoint of the last step is committed, or known to have failed, go on."""
    state = turn.state
    if state.stage is not Stage.COMMITTING:
        return
    last = next(iter(state.exits.values()))
    name = str(CheckpointName(last.step, state.attempt, state.generation))
    if _is_durable(state, last.step):
        _go_on(turn, last.kind)
    elif name in state.failed_saves:
        go_on_without_commit(turn, "the checkpoint of the last step could not be saved")
    elif any(state.process(index) is None and _takes_its_part_along(state, index) for index in state.members):
        _re_form(turn)


def go_on_without_commit(turn: Turn, message: str) -> None:
    """The state of the last step did not become durable: finishing would lose the model, switching loses steps."""
    last = next(iter(turn.state.exits.values()))
    if last.kind is ExitKind.FINISHED:
        turn.end(EndReason.STORAGE_FAILED, f"training finished, but its result is not durable: {message}")
        return
    turn.emit("generation.switch_lossy", message=message, restore=turn.state.newest)
    turn.set(grow_not_before=turn.now + 60.0)
    _go_on(turn, last.kind)


def _takes_its_part_along(state: Attempt, index: int) -> bool:
    """This member has left as planned, but its part of that step's checkpoint was not heard of yet."""
    shard_exit = state.exits.get(index)
    if shard_exit is None or shard_exit.kind not in _PLANNED:
        return False
    if not state.group_active and state.stage is not Stage.COMMITTING:
        return False
    name = str(CheckpointName(shard_exit.step, state.attempt, state.generation))
    return shard_exit.rank not in state.parts.get(name, {}) and not _is_durable(state, shard_exit.step)


def _is_durable(state: Attempt, step: int) -> bool:
    newest = CheckpointName.parse(state.newest) if state.newest else None
    return newest is not None and newest.step >= step


def _go_on(turn: Turn, kind: ExitKind) -> None:
    if kind is ExitKind.FINISHED:
        turn.end(EndReason.FINISHED, f"finished after {turn.state.step} steps")
    else:
        forming.plan_next(turn)


def _lose(turn: Turn, cause: IncidentCause, witness: str, message: str, process: Process | None) -> None:
    """The group is lost: from now on it is quiescing."""
    _blame(turn, cause, witness, message, process)
    _quiesce(turn)


def _blame(turn: Turn, cause: IncidentCause, witness: str, message: str, process: Process | None) -> None:
    """Open the incident, or add to the one that is open.

    `process`: the one that is gone; None where the group broke and nobody is known to be gone.
    """
    state = turn.state
    rank = None if process is None else state.rank_of(process.index)
    ranks = () if rank is None else (rank,)
    names = () if process is None else (process.shard_id,)
    node_id = process.info.node_id if process is not None and process.info is not None else ""
    if state.incident is None:
        incident = Incident(
            id=state.num_incidents + 1,
            cause=cause,
            witness=witness,
            ranks=ranks,
            shard_ids=names,
            node_id=node_id,
            generation=state.generation,
            at=turn.now,
            from_workers=len(state.members),
            message=message,
            step_before=state.step,
        )
        turn.set(incident=incident, num_incidents=incident.id)
        turn.emit(
            "incident.opened", id=incident.id, cause=cause, witness=witness, ranks=list(ranks), message=message,
            generation=state.generation, workers=len(state.members), step=state.step,
        )  # fmt: skip
    else:
        known = state.incident
        verdict = {"cause": cause, "witness": witness, "message": message, "node_id": node_id}
        suspicion = known.cause in (IncidentCause.COLLECTIVE_FAILED, IncidentCause.FORM_FAILED) and process is not None
        turn.set(
            incident=known.model_copy(
                update={
                    "ranks": tuple(sorted({*known.ranks, *ranks})),
                    "shard_ids": tuple(dict.fromkeys((*known.shard_ids, *names))),
                    "formed_at": None,  # a late report of a step must not close it
                    **(verdict if suspicion else {}),
                }
            )
        )
    turn.show_incident()


def interrupt_rest(turn: Turn) -> None:
    """Wake those that have not left `run` by themselves."""
    turn.set(interrupt_at=None)
    turn.do(*(Interrupt(index, turn.state.generation) for index in _still_in_run(turn)))


def _quiesce(turn: Turn) -> None:
    if turn.state.stage is Stage.QUIESCING:
        return
    turn.enter(Stage.QUIESCING)
    interrupt_rest(turn)


def _hear_the_others(turn: Turn) -> None:
    """A rank that is a little slower is about to raise the same: once it is interrupted, nobody would know."""
    turn.enter(Stage.QUIESCING)
    turn.set(interrupt_at=turn.now + turn.state.timeouts.user_error_grace_s)


def _re_form(turn: Turn) -> None:
    """Survivors are out of their collectives: form the next group, unless this has gone on for too long."""
    state = turn.state
    recoveries, fruitless = state.recoveries + 1, state.fruitless + 1
    back_off_s = 0.0 if fruitless <= 2 else min(30.0, 0.5 * 2 ** (fruitless - 2))
    turn.set(recoveries=recoveries, fruitless=fruitless, not_before=turn.now + back_off_s)
    if state.incident is not None:
        turn.set(
            incident=state.incident.model_copy(
                update={"quiesced_at": turn.now, "step_before": max(state.incident.step_before, state.step)}
            )
        )
    last = state.incident.message if state.incident else "unknown"
    if recoveries > state.spec.retry.max_recoveries:
        turn.end(
            EndReason.RECOVERY_BUDGET,
            f"recovered {state.recoveries} times, and retry.max_recoveries is {state.spec.retry.max_recoveries}; "
            f"last: {last}",
        )
    elif fruitless > _FRUITLESS_LIMIT:
        turn.end(
            EndReason.RECOVERY_BUDGET,
            f"{_FRUITLESS_LIMIT} re-formations in a row completed no step; last: {last}",
        )
    else:
        forming.plan_next(turn)


def _fall_back(turn: Turn, shard_exit: ShardExit) -> None:
    state = turn.state
    bad = state.restored
    message = shard_exit.error.message if shard_exit.error else "verification failed"
    assert bad is not None
    damaged = (*state.damaged, bad)
    turn.set(damaged=damaged, newest=None if state.newest == bad else state.newest)
    turn.emit("checkpoint.damaged", name=bad, message=message)
    if state.incident is not None:
        turn.set(incident=state.incident.model_copy(update={"quiesced_at": turn.now}))
    if state.wanted is Wanted.PAUSE:
        turn.end(EndReason.PAUSED, "paused on request")
        return
    turn.enter(Stage.FALLING_BACK)
    turn.do(ForgetDamaged(bad, message), FindCheckpoint(excluding=damaged))


def _still_in_run(turn: Turn) -> list[int]:
    in_run = {p.index for p in turn.state.processes if p.in_run}
    return [index for index in turn.state.members if index in in_run]


def _grouped(exits: list[ShardExit]) -> UserFailure:
    """The error that most ranks raised, with all of them."""
    groups: dict[tuple[str, str], list[ShardExit]] = {}
    for shard_exit in exits:
        if shard_exit.error is not None:
            groups.setdefault((shard_exit.error.type, shard_exit.error.message), []).append(shard_exit)
    largest = max(groups.values(), key=len)
    error = largest[0].error
    assert error is not None
    return UserFailure(
        type=error.type,
        message=error.message,
        traceback=error.traceback,
        phase=error.phase,
        ranks=tuple(sorted(e.rank for e in largest)),
        step=largest[0].step,
    )
