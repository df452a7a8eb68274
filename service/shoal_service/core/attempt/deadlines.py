"""What time alone brings about. Looked at after every event, so that a busy queue puts no deadline off."""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.faults import hangs, stragglers
from shoal_service.core.attempt.group import leaving, outcome, recall
from shoal_service.core.attempt.state.stages import (
    Committing,
    FallingBack,
    Forming,
    Opening,
    Quiescing,
    Running,
    Stage,
    Starting,
    Switching,
    Waiting,
)
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.job import EndReason, IncidentCause


def look(turn: Turn) -> None:
    _stage(turn)
    if turn.stage is not Stage.ENDED:
        _the_unreachable(turn)
        stragglers.keep_the_irreplaceable(turn)


def forgive_absence(turn: Turn) -> None:
    """The supervisor was away itself: stopped, or restarted. What it did not hear meanwhile is nobody's silence."""
    state = turn.state
    away_s = turn.now - turn.progress.last_event_at
    if not state.group_active and not turn.snapshots.requested:
        return  # no answer is waited for; a state that only waits stays the same value
    if turn.progress.last_event_at and away_s > turn.config.timeouts.absence_s:
        _put_off(turn, away_s)
    turn.progress = replace(turn.progress, last_event_at=turn.now)


def _put_off(turn: Turn, away_s: float) -> None:
    """All that answers and progress are measured from is `away_s` later."""

    def later(at: float) -> float:
        return min(turn.now, at + away_s)

    quiescing = turn.current
    if isinstance(quiescing, Quiescing) and quiescing.interrupted_at is not None:
        turn.stay(replace(quiescing, interrupted_at=later(quiescing.interrupted_at)))
    requested = {index: later(at) for index, at in turn.snapshots.requested.items()}
    turn.snapshots = replace(turn.snapshots, requested=requested)
    turn.progress = replace(
        turn.progress,
        advanced_at=later(turn.progress.advanced_at),
        answered_at={index: later(at) for index, at in turn.progress.answered_at.items()},
        stamps={index: replace(stamp, seen_at=later(stamp.seen_at)) for index, stamp in turn.progress.stamps.items()},
    )
    for worker in turn.pool.workers:
        if worker.unreachable_since is not None:
            turn.pool = turn.pool.with_worker(replace(worker, unreachable_since=later(worker.unreachable_since)))


def _stage(turn: Turn) -> None:
    target, timeouts, num_usable = turn.target, turn.config.timeouts, turn.state.num_usable
    waited = turn.now - turn.current.since
    match turn.current:
        case Opening() | FallingBack() if waited > timeouts.commit_s:
            turn.end(EndReason.STORAGE_FAILED, f"{turn.config.checkpoint_root} did not answer for {waited:.0f} s")
        case Starting() if waited > timeouts.start_s and num_usable < target.min_workers:
            turn.end(
                EndReason.CAPACITY_TIMEOUT,
                f"only {num_usable} of at least {target.min_workers} workers started within {waited:.0f} s",
            )
        case Waiting(recall_until=float() as until) if turn.now >= until:
            recall.end(turn)
        case Waiting() if waited > target.spec.elasticity.wait_s and num_usable < target.min_workers:
            turn.end(
                EndReason.CAPACITY_TIMEOUT,
                f"{num_usable} of at least {target.min_workers} workers (elasticity.min_workers) for "
                f"{waited:.0f} s (elasticity.wait_s)",
            )
        case Forming() if waited > timeouts.form_s:
            message = f"the group did not form within {waited:.0f} s"
            leaving.lose_group(turn, IncidentCause.FORM_FAILED, "deadline", message)
        case Switching() if waited > timeouts.switch_s:
            message = f"no step boundary was reached in {waited:.0f} s"
            leaving.lose_group(turn, IncidentCause.COLLECTIVE_FAILED, "deadline", message)
        case Running() | Switching():
            _hang(turn)
        case Quiescing(interrupt_at=float() as interrupt_at) if turn.now >= interrupt_at:
            leaving.interrupt_rest(turn)
        case Quiescing():
            leaving.give_up_on_the_unresponsive(turn)
            outcome.follow_when_all_left(turn)  # the time to answer AskHoldings may have passed
        case Committing() if waited > timeouts.commit_s:
            outcome.go_on_without_commit(turn, f"the commit took longer than {waited:.0f} s")
        case _:
            pass


def _hang(turn: Turn) -> None:
    found = hangs.find_hang(turn.state, turn.now)
    if found is None:
        return
    message, hang = found
    turn.health = replace(turn.health, hang=hang)
    leaving.lose_group(turn, IncidentCause.HUNG, "progress stamps", message)


def _the_unreachable(turn: Turn) -> None:
    """Nothing else speaks against them, but nobody can wait for them for ever."""
    limit = turn.config.timeouts.unreachable_s
    for worker in turn.pool.workers:
        since = worker.unreachable_since
        if since is not None and turn.now - since >= limit and turn.stage is not Stage.ENDED:
            message = f"it did not answer for {limit:g} s"
            leaving.evict(turn, worker.index, IncidentCause.UNREACHABLE, "no answer", message)
