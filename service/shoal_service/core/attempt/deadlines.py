"""What each stage waits for and until when, and what time alone brings about.

    deadline = the later of: the stage's beginning, the newest progress of what is waited for   + the timeout

Slow is not dead: while a worker that starts reports progress of its preparation, or a rank of a group that forms one of
building or restoring, the deadline moves on. A counter that stands still moves nothing. Deadlines are checked after
every event, so that a busy queue delays none. `wait_of` and `overdue` decide and change nothing; `apply` carries out.
The status shows `wait_of`.

A worker that hangs is killed here. Once `hangs.find_hang` says that the group hangs, it is lost and interrupted; a
worker that does not leave in time (`unresponsive`), or does not answer at all (`is_given_up`), is evicted:

    witnesses.evict  ->  KillWorker  ->  supervisor/workers/ray_fleet.py, `kill`: ray.kill, a request to exit, SIGKILL
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from shoal_service.core.attempt import checkpoints, hangs, memory_snapshots, planning, stragglers, witnesses
from shoal_service.core.attempt.large_groups import later_s, quiesce_s
from shoal_service.core.attempt.state.attempt import Attempt, ProgressStamp
from shoal_service.core.attempt.state.persistent import IntMap
from shoal_service.core.attempt.state.stages import (
    Committing,
    CurrentStage,
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
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.quantities import count_text
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import Phase, later_to_form_s


@dataclass(frozen=True, slots=True)
class Overdue:
    deadline: Deadline
    reason: str


def apply(turn: Turn) -> None:
    found = overdue(turn.state, turn.now)
    if found is not None:
        _act(turn, found)
    if isinstance(turn.current, Quiescing):
        for one in unresponsive(turn.state, turn.current, turn.now):
            witnesses.evict(turn, one.index, one.cause, one.witness, one.reason)
        planning.consider(turn)  # the time to report snapshots may have passed
    silent = [w for w in turn.pool.workers if w.left_out is not None or w.unreachable_since is not None]
    for worker in silent:
        if turn.stage is Stage.ENDED:
            return
        given_up = is_given_up(turn.state, worker, turn.now)
        if given_up:
            witnesses.evict(turn, worker.index, IncidentCause.UNREACHABLE, "no answer", given_up.reason)
    if turn.stage is not Stage.ENDED:
        stragglers.keep_where_no_replacement_came(turn)


def forgive_absence(turn: Turn, *, is_reopened: bool) -> None:
    """Move the deadlines by the time in which the supervisor handled no event: it was suspended, had no CPU, or was
    restarted, and workers are not to blame for what it did not receive meanwhile.

    A turn that comes more than timeouts.absence_s after the last one is late. What a single late turn has missed is
    forgiven whole. If one turn after the other is late, absence_s of each counts, so a supervisor that is always slow
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
    """Move every deadline by the time of the absence, except those of the world outside, such as the end of a node."""

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
    """The stage with its deadline moved. A group that trains has no deadline of its own but that of a drain."""

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
    """The deadline of the current stage that has passed, or the hang of its group; None: neither."""
    wait = wait_of(state)
    if wait is not None and wait.until is not None and _is_over(wait, now):
        return Overdue(wait.deadline, _reason(state, wait, now))
    hang = hangs.find_hang(state, now)
    return Overdue(Deadline.PROGRESS, hang.reason) if hang else None


def _is_over(wait: Wait, now: float) -> bool:
    """Whether the wait is over. Some waits end elsewhere: in `checkpoints`, `forming` (the back-off), `unresponsive`
    (survivors)."""
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
            if state.target.is_script:
                return f"the script did not end within {waited:.0f} s on every rank"
            return f"no step boundary was reached in {waited:.0f} s"
        case Deadline.USER_ERRORS:
            return f"{timeouts.user_error_grace_s:g} s have passed since the first user error"
        case Deadline.COMMIT:
            return f"the commit took longer than {waited:.0f} s"
        case _:
            return wait.words


@dataclass(frozen=True, slots=True)
class Eviction:
    index: int
    cause: IncidentCause
    witness: str
    reason: str


def unresponsive(state: Attempt, quiescing: Quiescing, now: float) -> list[Eviction]:
    """The workers of a lost group that are not waited for any longer, each with the reason, by rank."""
    if quiescing.interrupted_at is None:
        return []
    waited, limit_s = now - quiescing.interrupted_at, quiesce_s(state)
    unresponsive_s = state.config.timeouts.unresponsive_s + later_s(len(state.pool.workers))
    hung = state.incident is not None and state.incident.cause is IncidentCause.HUNG
    too_late = IncidentCause.HUNG if hung else IncidentCause.STUCK
    silent = hangs.unanswering(state, now) if hung else frozenset()
    generation, found = state.group.generation, []
    for index in state.in_run:
        worker = state.pool.worker(index)
        has_acknowledged = worker is not None and worker.acknowledged == generation
        if worker is not None and worker.unreachable_since is not None:
            reason = f"it does not answer, and generation {generation} has failed"
            found.append(Eviction(index, IncidentCause.UNREACHABLE, "no answer", reason))
        elif index in silent and not has_acknowledged:
            reason = f"it has left its polls unanswered for {hangs.silent_s(state):g} s or more"
            found.append(Eviction(index, IncidentCause.HUNG, "no answer", reason))
        elif not has_acknowledged and waited >= unresponsive_s:
            reason = f"it did not acknowledge the end of generation {generation} within {unresponsive_s:.3g} s"
            found.append(Eviction(index, too_late, "deadline", reason))
        elif waited >= limit_s:
            reason = f"it did not leave generation {generation} within {limit_s:.3g} s"
            found.append(Eviction(index, too_late, "deadline", reason))
    return found


def is_given_up(state: Attempt, worker: Worker, now: float) -> Decision:
    """Whether a worker that does not answer is given up. It is not known to be dead, but it is not waited for without
    end."""
    if worker.left_out is not None:
        return witnesses.is_left_out_given_up(state, worker.left_out, now)
    limit_s = state.config.timeouts.unreachable_s + later_s(len(state.pool.workers))
    if worker.unreachable_since is None:
        return Decision(False, "it answers")
    return Decision(now - worker.unreachable_since >= limit_s, f"it did not answer for {limit_s:.3g} s")


def _act(turn: Turn, found: Overdue) -> None:
    match found.deadline:
        case Deadline.WORKERS:
            turn.end(EndReason.CAPACITY_TIMEOUT, found.reason)
        case Deadline.ORPHANED_SNAPSHOTS:
            memory_snapshots.stop_waiting(turn)
        case Deadline.FORMED:
            witnesses.lose_group(turn, IncidentCause.FORM_FAILED, "deadline", found.reason)
        case Deadline.STEP_BOUNDARY:
            witnesses.lose_group(turn, IncidentCause.COLLECTIVE_FAILED, "deadline", found.reason)
        case Deadline.PROGRESS:
            turn.health = replace(turn.health, hang=hangs.find_hang(turn.state, turn.now).hang)
            witnesses.lose_group(turn, IncidentCause.HUNG, "progress stamps", found.reason)
        case Deadline.USER_ERRORS:
            witnesses.interrupt_rest(turn)
        case Deadline.COMMIT:
            planning.go_on_without_commit(turn, found.reason)
        case Deadline.STORAGE | Deadline.MORE_WORKERS | Deadline.BACK_OFF | Deadline.SURVIVORS:
            pass  # never overdue, see `_is_over`
        case _:
            assert_never(found.deadline)


class Deadline(StrEnum):
    """What was waited for and did not come in time."""

    STORAGE = "storage"
    WORKERS = "workers"
    """Too few workers are usable: fewer than elasticity.min_workers."""
    MORE_WORKERS = "more_workers"
    """The granted workers beyond elasticity.min_workers. At the deadline the group forms without them."""
    BACK_OFF = "back_off"
    ORPHANED_SNAPSHOTS = "orphaned_snapshots"
    FORMED = "formed"
    STEP_BOUNDARY = "step_boundary"
    PROGRESS = "progress"
    USER_ERRORS = "user_errors"
    """Other ranks get time to raise the same error as the first one."""
    SURVIVORS = "survivors"
    """The survivors get time to leave a group that was lost."""
    COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Wait:
    deadline: Deadline
    until: float | None
    """Wall-clock time of the deadline; None: the wait ends when the workers report."""
    words: str
    """What is waited for, with the setting that limits it. The text does not change while only time passes."""


def wait_of(state: Attempt) -> Wait | None:
    """What the current stage waits for, and until when; None: it trains, or has ended."""
    timeouts, since = state.config.timeouts, state.current.since
    match state.current:
        case Opening() | FallingBack():
            limit_s = state.target.spec.checkpoint.wait_s
            words = f"{state.config.checkpoint_root} to list its checkpoints (checkpoint.wait_s {limit_s:g} s)"
            return Wait(Deadline.STORAGE, checkpoints.search_deadline(state), words)
        case Waiting(orphans_until=float()):
            words = f"workers to read the snapshots on their nodes ({timeouts.orphans_s:g} s without progress)"
            return Wait(Deadline.ORPHANED_SNAPSHOTS, memory_snapshots.waiting_until(state), words)
        case Starting():
            return _for_workers(state, timeouts.start_s, "timeouts.start_s")
        case Waiting(refused=str() as refused) if refused:
            wait_s = state.target.spec.elasticity.wait_s
            words = f"workers on other nodes, since {refused} (elasticity.wait_s {wait_s:g} s)"
            return Wait(Deadline.WORKERS, _newest(since, _starting(state)) + wait_s, words)
        case Waiting():
            return _for_workers(state, state.target.spec.elasticity.wait_s, "elasticity.wait_s")
        case Forming():
            return _for_group(state)
        case Switching() if state.target.is_script and state.is_finishing:
            return Wait(Deadline.STEP_BOUNDARY, None, "the script to end on the other ranks")
        case Switching() if state.target.is_script:
            until = since + timeouts.switch_s + state.target.grace_s
            words = f"the processes of the script to end (script.grace_s {state.target.grace_s:g} s)"
            return Wait(Deadline.STEP_BOUNDARY, until, words)
        case Switching():
            words = f"the group to reach the end of its step ({timeouts.switch_s:g} s)"
            return Wait(Deadline.STEP_BOUNDARY, since + timeouts.switch_s, words)
        case Quiescing(interrupt_at=float() as at):
            return Wait(Deadline.USER_ERRORS, at, "other ranks to raise the same error")
        case Quiescing(interrupted_at=interrupted_at):
            words = f"the workers to leave the lost group ({quiesce_s(state):.3g} s)"
            return Wait(Deadline.SURVIVORS, (interrupted_at or since) + quiesce_s(state), words)
        case Committing():
            words = f"the storage to commit the checkpoint (timeouts.commit_s {timeouts.commit_s:g} s)"
            return Wait(Deadline.COMMIT, since + timeouts.commit_s, words)
        case _:
            return None


def _for_workers(state: Attempt, timeout_s: float, setting: str) -> Wait:
    usable, minimum, granted = state.num_usable, state.target.min_workers, state.target.granted
    if usable < minimum:
        words = f"at least {count_text(minimum, 'worker')} ({setting} {timeout_s:g} s without progress)"
        return Wait(Deadline.WORKERS, _newest(state.current.since, _starting(state)) + timeout_s, words)
    if state.budgets.form_not_before > state.current.since:
        words = f"the pause after {count_text(state.budgets.fruitless, 're-formation')} without a new step"
        return Wait(Deadline.BACK_OFF, state.budgets.form_not_before, words)
    return Wait(Deadline.MORE_WORKERS, None, f"the other workers to start, {usable} of {granted} ready")


def _for_group(state: Attempt) -> Wait:
    timeouts, ranks, queued_s = state.config.timeouts, state.group.ranks, later_s(len(state.group.workers))
    stamps = [stamp for index, stamp in state.progress.stamps.items() if index in ranks]
    newest = _newest(state.current.since, stamps)
    if any(stamp.phase is Phase.RESTORING for stamp in stamps):
        words = f"the group to restore its state (timeouts.restore_s {timeouts.restore_s:g} s without progress)"
        return Wait(Deadline.FORMED, newest + timeouts.restore_s + queued_s, words)
    connecting_s = later_to_form_s(len(ranks))
    more = f" + {connecting_s:g} s for {count_text(len(ranks), 'rank')}" if connecting_s else ""
    words = f"the group to form and to build its model (timeouts.form_s {timeouts.form_s:g} s{more} without progress)"
    return Wait(Deadline.FORMED, newest + timeouts.form_s + connecting_s + queued_s, words)


def _starting(state: Attempt) -> list[ProgressStamp]:
    """Words about the progress of the workers that are not warm yet."""
    starting = {worker.index for worker in state.pool.workers if not worker.warm}
    return [stamp for index, stamp in state.progress.starting.items() if index in starting]


def _newest(since: float, stamps: list[ProgressStamp]) -> float:
    return max([since, *(stamp.seen_at for stamp in stamps)])
