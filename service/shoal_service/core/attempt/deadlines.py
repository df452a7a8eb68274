"""What time alone brings about. Checked after every event, so that a busy queue delays no deadline.

`overdue` decides and changes nothing; `apply` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from shoal_service.core.attempt.decision import Decision
from shoal_service.core.attempt.faults import hangs, stragglers
from shoal_service.core.attempt.faults.large_groups import later_s
from shoal_service.core.attempt.group import exits, follow_up, orphaned_snapshots, silent_nodes
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.persistent.int_map import IntMap
from shoal_service.core.attempt.state.progress import ProgressStamp
from shoal_service.core.attempt.state.stages import CurrentStage, Quiescing, Running, Stage, Starting, Waiting
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.attempt.waits import Deadline, Wait, wait_of
from shoal_service.core.quantities import count_text
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


def forgive_absence(turn: Turn, *, is_reopened: bool) -> None:
    """Time in which the supervisor handled no event counts for no deadline: it was suspended, had no CPU, or was
    restarted, and workers are not to blame for what it did not receive meanwhile.

    A turn that comes more than timeouts.absence_s after the last one is late. What a single late turn has missed is
    forgiven whole. If one turn after the other is late, absence_s of each count, so a supervisor that is always slow
    still notices a worker that never answers.

    Args:
        is_reopened: the supervisor was restarted. The journal of an attempt that only waits, for capacity say, does not
            say until when its predecessor lived, so nothing is forgiven then.
    """
    progress = turn.progress
    away_s = turn.now - progress.last_event_at if progress.last_event_at else 0.0
    is_late = away_s > turn.config.timeouts.absence_s
    only_waits = not turn.state.group_active and not turn.snapshots.requested
    if is_late and not (is_reopened and only_waits):
        _put_off(turn, away_s - turn.config.timeouts.absence_s if progress.is_late else away_s)
    turn.progress = replace(turn.progress, last_event_at=turn.now, is_late=is_late)


def _put_off(turn: Turn, away_s: float) -> None:
    """Every deadline but those of the world outside, such as the end of a node, moves by the time of the absence."""

    def later(at: float) -> float:
        return min(turn.now, at + away_s)

    def stamps_later(stamps: dict[int, ProgressStamp]) -> dict[int, ProgressStamp]:
        return {index: replace(stamp, seen_at=later(stamp.seen_at)) for index, stamp in stamps.items()}

    turn.stay(_stage_later(turn.current, away_s, turn.now))
    requested = IntMap((index, later(at)) for index, at in turn.snapshots.requested.items())
    turn.snapshots = replace(turn.snapshots, requested=requested)
    turn.progress = replace(
        turn.progress,
        advanced_at=later(turn.progress.advanced_at),
        answered_at={index: later(at) for index, at in turn.progress.answered_at.items()},
        stamps=stamps_later(turn.progress.stamps),
        starting=stamps_later(turn.progress.starting),
    )
    if turn.code.update is not None:
        turn.code = replace(turn.code, update=replace(turn.code.update, since=later(turn.code.update.since)))
    settle_s = max(turn.config.timeouts.gather_s, turn.config.timeouts.settle_s)
    for worker in turn.pool.workers:
        changed = worker
        if worker.warm_at is not None and turn.now - away_s - worker.warm_at < settle_s:
            changed = replace(changed, warm_at=later(worker.warm_at))
        if worker.slow_until is not None:
            changed = replace(changed, slow_until=worker.slow_until + away_s)
        if worker.unreachable_since is not None:
            changed = replace(changed, unreachable_since=later(worker.unreachable_since))
        if worker.left_out is not None:
            answers_since = worker.left_out.answers_since
            left_out = replace(
                worker.left_out,
                since=later(worker.left_out.since),
                answers_since=later(answers_since) if answers_since is not None else None,
            )
            changed = replace(changed, left_out=left_out)
        if changed is not worker:
            turn.pool = turn.pool.with_worker(changed)


def _stage_later(current: CurrentStage, away_s: float, now: float) -> CurrentStage:
    """What a stage waits for is waited for longer. A group that trains has no deadline of its own but a drain's."""

    def later(at: float) -> float:
        return min(now, at + away_s)

    if isinstance(current, Running):
        since = current.draining_since
        return replace(current, draining_since=later(since)) if since is not None else current
    current = replace(current, since=later(current.since))
    if isinstance(current, Waiting) and current.orphans_until is not None:
        return replace(current, orphans_until=current.orphans_until + away_s)
    if isinstance(current, Quiescing) and current.interrupt_at is not None:
        return replace(current, interrupt_at=current.interrupt_at + away_s)
    if isinstance(current, Quiescing) and current.interrupted_at is not None:
        return replace(current, interrupted_at=later(current.interrupted_at))
    return current


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
                f"only {num_usable} of at least {count_text(minimum, 'worker')} started within {waited:.0f} "
                "s, and no other made "
                f"progress for timeouts.start_s {timeouts.start_s:g} s"
            )
        case Deadline.WORKERS if isinstance(state.current, Waiting) and state.current.refused:
            return f"{state.current.refused}. No other workers came for {waited:.0f} s (elasticity.wait_s)"
        case Deadline.WORKERS:
            return (
                f"{num_usable} of at least {count_text(minimum, 'worker')} (elasticity.min_workers) for {waited:.0f} s "
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
    limit_s = state.config.timeouts.unreachable_s + later_s(len(state.pool.workers))
    if worker.unreachable_since is None:
        return Decision(False, "it answers")
    return Decision(now - worker.unreachable_since >= limit_s, f"it did not answer for {limit_s:.3g} s")


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
