"""What each stage waits for, and until when. Pure; `deadlines` ends a wait that is over, and the status shows it.

    deadline = the later of: the stage's beginning, the newest progress of what is waited for   + the timeout

Slow is not dead: while a worker that starts reports progress of its preparation, or a rank of a group that forms one of
building or restoring, the deadline moves on. A counter that stands still moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_service.core.attempt import checkpoint_search
from shoal_service.core.attempt.faults.large_groups import later_s, quiesce_s
from shoal_service.core.attempt.group import orphaned_snapshots
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.progress import ProgressStamp
from shoal_service.core.attempt.state.stages import (
    Committing,
    FallingBack,
    Forming,
    Opening,
    Quiescing,
    Starting,
    Switching,
    Waiting,
)
from shoal_service.core.quantities import count_text
from shoal_workers.contract.messages import Phase, later_to_form_s


class Deadline(StrEnum):
    """What was waited for and did not come in time."""

    STORAGE = "storage"
    WORKERS = "workers"
    """elasticity.min_workers of them."""
    MORE_WORKERS = "more_workers"
    """The granted ones, beyond elasticity.min_workers; then the group forms without them."""
    BACK_OFF = "back_off"
    ORPHANED_SNAPSHOTS = "orphaned_snapshots"
    FORMED = "formed"
    STEP_BOUNDARY = "step_boundary"
    PROGRESS = "progress"
    USER_ERRORS = "user_errors"
    """Other ranks had time to raise the same error as the first one."""
    SURVIVORS = "survivors"
    """To leave a group that was lost."""
    COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Wait:
    deadline: Deadline
    until: float | None
    """Wall-clock time; None: until the workers themselves report."""
    words: str
    """What is waited for, with the setting; does not change while only time passes."""


def wait_of(state: Attempt) -> Wait | None:
    """What the current stage waits for; None: it trains, or has ended."""
    timeouts, since = state.config.timeouts, state.current.since
    match state.current:
        case Opening() | FallingBack():
            limit_s = state.target.spec.checkpoint.wait_s
            words = f"{state.config.checkpoint_root} to list its checkpoints (checkpoint.wait_s {limit_s:g} s)"
            return Wait(Deadline.STORAGE, checkpoint_search.deadline(state), words)
        case Waiting(orphans_until=float()):
            words = f"workers to read the snapshots on their nodes ({timeouts.orphans_s:g} s without progress)"
            return Wait(Deadline.ORPHANED_SNAPSHOTS, orphaned_snapshots.waiting_until(state), words)
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
    """Of the workers that are not warm yet."""
    starting = {worker.index for worker in state.pool.workers if not worker.warm}
    return [stamp for index, stamp in state.progress.starting.items() if index in starting]


def _newest(since: float, stamps: list[ProgressStamp]) -> float:
    return max([since, *(stamp.seen_at for stamp in stamps)])
