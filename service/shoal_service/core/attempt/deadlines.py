"""What time alone brings about. Checked after every event, so that a busy queue delays no deadline.

`overdue` decides and changes nothing; `apply` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from shoal_service.core.attempt.decision import Decision
from shoal_service.core.attempt.faults import hangs, stragglers
from shoal_service.core.attempt.group import exits, follow_up, orphaned_snapshots, silent_nodes
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Quiescing, Stage, Starting, Waiting
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.attempt.waits import Deadline, Wait, wait_of
from shoal_workers.contract.job import EndReason, IncidentCause


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
    silent = [w for w in turn.pool.workers if w.left_out is not None or w.unreachable_since is not None]
    for worker in silent:
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
            worker = replace(worker, unreachable_since=later(worker.unreachable_since))
        if worker.left_out is not None and worker.left_out.answers_since is not None:
            left_out = replace(worker.left_out, answers_since=later(worker.left_out.answers_since))
            worker = replace(worker, left_out=left_out)
        turn.pool = turn.pool.with_worker(worker)


def overdue(state: Attempt, now: float) -> Overdue | None:
    """The deadline of the current stage that has passed."""
    wait = wait_of(state)
    if wait is not None and wait.until is not None and _is_over(wait, now):
        return Overdue(wait.deadline, _reason(state, wait, now))
    hang = hangs.find_hang(state, now)
    return Overdue(Deadline.PROGRESS, hang.reason) if hang else None


def _is_over(wait: Wait, now: float) -> bool:
    """Some waits end elsewhere: in `checkpoint_search`, `group/forming` (the back-off), `group/exits` (survivors)."""
    if wait.until is None or wait.deadline in (Deadline.STORAGE, Deadline.BACK_OFF, Deadline.SURVIVORS):
        return False
    at_once = wait.deadline in (Deadline.ORPHANED_SNAPSHOTS, Deadline.USER_ERRORS)
    return now >= wait.until if at_once else now > wait.until


def _reason(state: Attempt, wait: Wait, now: float) -> str:
    waited, timeouts = now - state.current.since, state.config.timeouts
    num_usable, minimum = state.num_usable, state.target.min_workers
    match wait.deadline:
        case Deadline.WORKERS if isinstance(state.current, Starting):
            return (
                f"only {num_usable} of at least {minimum} workers started within {waited:.0f} s, and no other made "
                f"progress for timeouts.start_s {timeouts.start_s:g} s"
            )
        case Deadline.WORKERS if isinstance(state.current, Waiting) and state.current.refused:
            return f"{state.current.refused}. No other workers came for {waited:.0f} s (elasticity.wait_s)"
        case Deadline.WORKERS:
            return (
                f"{num_usable} of at least {minimum} workers (elasticity.min_workers) for {waited:.0f} s "
                "(elasticity.wait_s)"
            )
        case Deadline.ORPHANED_SNAPSHOTS:
            return f"no worker has reported the snapshots within {timeouts.orphans_s:g} s"
        case Deadline.FORMED:
            return f"the group did not form within {waited:.0f} s: waited for {wait.words}"
        case Deadline.STEP_BOUNDARY:
            return f"no step boundary was reached in {waited:.0f} s"
        case Deadline.USER_ERRORS:
            return f"{timeouts.user_error_grace_s:g} s have passed since the first user error"
        case Deadline.COMMIT:
            return f"the commit took longer than {waited:.0f} s"
        case _:
            return wait.words


def is_given_up(state: Attempt, worker: Worker, now: float) -> Decision:
    """An unreachable worker is not known to be dead, but it is not waited for without end."""
    if worker.left_out is not None:
        return silent_nodes.is_given_up(state, worker.left_out, now)
    limit, since = state.config.timeouts.unreachable_s, worker.unreachable_since
    if since is None:
        return Decision(False, "it answers")
    return Decision(now - since >= limit, f"it did not answer for {limit:g} s")


def _act(turn: Turn, found: Overdue) -> None:
    match found.deadline:
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
        case Deadline.STORAGE | Deadline.MORE_WORKERS | Deadline.BACK_OFF | Deadline.SURVIVORS:
            pass  # never overdue, see `_is_over`
        case _:
            assert_never(found.deadline)
