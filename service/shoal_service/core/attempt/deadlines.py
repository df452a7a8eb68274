"""What time alone brings about. Checked after every event, so that a busy queue delays no deadline.

`overdue` decides and changes nothing; `apply` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from shoal_service.core.attempt.decision import Decision
from shoal_service.core.attempt.faults import hangs, stragglers
from shoal_service.core.attempt.group import exits, follow_up, orphaned_snapshots
from shoal_service.core.attempt.state.attempt import Attempt
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
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.job import EndReason, IncidentCause


class Deadline(StrEnum):
    """What was waited for and did not come in time."""

    STORAGE = "storage"
    WORKERS = "workers"
    """elasticity.min_workers of them."""
    ORPHANED_SNAPSHOTS = "orphaned_snapshots"
    FORMED = "formed"
    STEP_BOUNDARY = "step_boundary"
    PROGRESS = "progress"
    USER_ERRORS = "user_errors"
    """Other ranks had time to raise the same error as the first one."""
    COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Overdue:
    deadline: Deadline
    reason: str


def apply(turn: Turn) -> None:
    found = overdue(turn.state, turn.now)
    if found is not None:
        _act(turn, found)
    elif turn.stage is Stage.QUIESCING:
        exits.evict_unresponsive(turn)
        follow_up.follow_when_all_left(turn)  # the time to report snapshots may have passed
    for worker in turn.pool.workers:
        if turn.stage is Stage.ENDED:
            return
        given_up = is_given_up(turn.state, worker, turn.now)
        if given_up:
            exits.evict(turn, worker.index, IncidentCause.UNREACHABLE, "no answer", given_up.reason)
    if turn.stage is not Stage.ENDED:
        stragglers.keep_where_no_replacement_came(turn)


def forgive_absence(turn: Turn) -> None:
    """If the supervisor handled no event for timeouts.absence_s, it was suspended or restarted. Workers are not to
    blame for what it did not receive meanwhile."""
    state = turn.state
    away_s = turn.now - turn.progress.last_event_at
    if not state.group_active and not turn.snapshots.requested:
        return  # no answer is waited for; a state that only waits stays the same value
    if turn.progress.last_event_at and away_s > turn.config.timeouts.absence_s:
        _put_off(turn, away_s)
    turn.progress = replace(turn.progress, last_event_at=turn.now)


def _put_off(turn: Turn, away_s: float) -> None:
    """Deadlines of answers and of progress move by the time of the absence."""

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


def overdue(state: Attempt, now: float) -> Overdue | None:
    """The deadline of the current stage that has passed."""
    target, timeouts, num_usable = state.target, state.config.timeouts, state.num_usable
    waited, minimum = now - state.current.since, state.target.min_workers
    match state.current:
        case Opening() | FallingBack() if waited > timeouts.commit_s:
            return Overdue(Deadline.STORAGE, f"{state.config.checkpoint_root} did not answer for {waited:.0f} s")
        case Starting() if waited > timeouts.start_s and num_usable < minimum:
            reason = f"only {num_usable} of at least {minimum} workers started within {waited:.0f} s"
            return Overdue(Deadline.WORKERS, reason)
        case Waiting(orphans_until=float() as until) if now >= until:
            return Overdue(
                Deadline.ORPHANED_SNAPSHOTS, f"no worker has reported the snapshots within {timeouts.orphans_s:g} s"
            )
        case Waiting() if waited > target.spec.elasticity.wait_s and num_usable < minimum:
            reason = (
                f"{num_usable} of at least {minimum} workers (elasticity.min_workers) for {waited:.0f} s "
                "(elasticity.wait_s)"
            )
            return Overdue(Deadline.WORKERS, reason)
        case Forming() if waited > timeouts.form_s:
            return Overdue(Deadline.FORMED, f"the group did not form within {waited:.0f} s")
        case Switching() if waited > timeouts.switch_s:
            return Overdue(Deadline.STEP_BOUNDARY, f"no step boundary was reached in {waited:.0f} s")
        case Running() | Switching():
            hang = hangs.find_hang(state, now)
            return Overdue(Deadline.PROGRESS, hang.reason) if hang else None
        case Quiescing(interrupt_at=float() as at) if now >= at:
            reason = f"{timeouts.user_error_grace_s:g} s have passed since the first user error"
            return Overdue(Deadline.USER_ERRORS, reason)
        case Committing() if waited > timeouts.commit_s:
            return Overdue(Deadline.COMMIT, f"the commit took longer than {waited:.0f} s")
        case _:
            return None


def is_given_up(state: Attempt, worker: Worker, now: float) -> Decision:
    """An unreachable worker is not known to be dead, but it is not waited for without end."""
    limit, since = state.config.timeouts.unreachable_s, worker.unreachable_since
    if since is None:
        return Decision(False, "it answers")
    return Decision(now - since >= limit, f"it did not answer for {limit:g} s")


def _act(turn: Turn, found: Overdue) -> None:
    match found.deadline:
        case Deadline.STORAGE:
            turn.end(EndReason.STORAGE_FAILED, found.reason)
        case Deadline.WORKERS:
            turn.end(EndReason.CAPACITY_TIMEOUT, found.reason)
        case Deadline.ORPHANED_SNAPSHOTS:
            orphaned_snapshots.stop_waiting(turn)
        case Deadline.FORMED:
            exits.lose_group(turn, IncidentCause.FORM_FAILED, "deadline", found.reason)
        case Deadline.STEP_BOUNDARY:
            exits.lose_group(turn, IncidentCause.COLLECTIVE_FAILED, "deadline", found.reason)
        case Deadline.PROGRESS:
            turn.health = replace(turn.health, hang=hangs.find_hang(turn.state, turn.now).hang)
            exits.lose_group(turn, IncidentCause.HUNG, "progress stamps", found.reason)
        case Deadline.USER_ERRORS:
            exits.interrupt_rest(turn)
        case Deadline.COMMIT:
            follow_up.go_on_without_commit(turn, found.reason)
        case _:
            assert_never(found.deadline)
