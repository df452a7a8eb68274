"""What time alone brings about. Looked at after every event, so that a busy queue puts no deadline off."""

from __future__ import annotations

from shoal_service.core.attempt.faults import hangs, stragglers
from shoal_service.core.attempt.group import judging, leaving, recall
from shoal_service.core.attempt.state.attempt import Stage
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.job import EndReason, IncidentCause


def look(turn: Turn) -> None:
    _stage(turn)
    if turn.state.stage is not Stage.ENDED:
        _the_unreachable(turn)
        stragglers.keep_the_irreplaceable(turn)


def forgive_absence(turn: Turn) -> None:
    """The supervisor was away itself: stopped, or restarted. What it did not hear meanwhile is nobody's silence."""
    state = turn.state
    away_s = turn.now - state.turned_at
    if not state.group_active and not state.asked:
        return  # nobody is listened for; a state that only waits stays the same value
    if state.turned_at and away_s > state.timeouts.absence_s:

        def later(at: float) -> float:
            return min(turn.now, at + away_s)

        turn.set(
            interrupted_at=None if state.interrupted_at is None else later(state.interrupted_at),
            progressed_at=later(state.progressed_at),
            asked={i: later(at) for i, at in state.asked.items()},
            answered={i: later(at) for i, at in state.answered.items()},
            beats={i: b.model_copy(update={"seen_at": later(b.seen_at)}) for i, b in state.beats.items()},
            workers=tuple(
                p if p.unreachable_since is None
                else p.model_copy(update={"unreachable_since": later(p.unreachable_since)})
                for p in state.workers
            ),
        )  # fmt: skip
    turn.set(turned_at=turn.now)


def _stage(turn: Turn) -> None:
    state = turn.state
    waited, timeouts = turn.now - state.since, state.timeouts
    match state.stage:
        case Stage.OPENING | Stage.FALLING_BACK if waited > timeouts.commit_s:
            turn.end(EndReason.STORAGE_FAILED, f"{state.checkpoint_root} did not answer for {waited:.0f} s")
        case Stage.STARTING if waited > timeouts.start_s and state.num_usable < state.min_workers:
            turn.end(
                EndReason.CAPACITY_TIMEOUT,
                f"only {state.num_usable} of at least {state.min_workers} workers started within {waited:.0f} s",
            )
        case Stage.WAITING if state.recall_until is not None and turn.now >= state.recall_until:
            recall.end(turn)
        case Stage.WAITING if waited > state.spec.elasticity.wait_s and state.num_usable < state.min_workers:
            turn.end(
                EndReason.CAPACITY_TIMEOUT,
                f"{state.num_usable} of at least {state.min_workers} workers (elasticity.min_workers) for "
                f"{waited:.0f} s (elasticity.wait_s)",
            )
        case Stage.FORMING if waited > timeouts.form_s:
            leaving.lose_group(
                turn, IncidentCause.FORM_FAILED, "deadline", f"the group did not come together within {waited:.0f} s"
            )
        case Stage.SWITCHING if waited > timeouts.switch_s:
            leaving.lose_group(
                turn, IncidentCause.COLLECTIVE_FAILED, "deadline", f"no step boundary was reached in {waited:.0f} s"
            )
        case Stage.RUNNING | Stage.SWITCHING:
            _hang(turn)
        case Stage.QUIESCING if state.interrupt_at is not None and turn.now >= state.interrupt_at:
            leaving.interrupt_rest(turn)
        case Stage.QUIESCING:
            leaving.give_up_on_the_unresponsive(turn)
            judging.judge_when_all_left(turn)  # those that were asked for their holdings may have had their time
        case Stage.COMMITTING if waited > timeouts.commit_s:
            judging.go_on_without_commit(turn, f"the commit took longer than {waited:.0f} s")
        case _:
            pass


def _hang(turn: Turn) -> None:
    found = hangs.find_hang(turn.state, turn.now)
    if found is None:
        return
    message, hang = found
    turn.set(hang=hang)
    leaving.lose_group(turn, IncidentCause.HUNG, "progress stamps", message)


def _the_unreachable(turn: Turn) -> None:
    """Nothing else speaks against them, but nobody can wait for them for ever."""
    limit = turn.state.timeouts.unreachable_s
    for worker in turn.state.workers:
        since = worker.unreachable_since
        if since is not None and turn.now - since >= limit and turn.state.stage is not Stage.ENDED:
            message = f"it did not answer for {limit:g} s"
            leaving.evict(turn, worker.index, IncidentCause.UNREACHABLE, "no answer", message)
