"""Hangs: no rank makes progress for longer than the group's own pace allows. Decisions are pure; `progress_reported`
keeps the stamps that they are made from.

    threshold = max(health.hang_factor x median step, health.hang_floor_s)
    newest progress of any rank is older than that     ->  the group hangs
    a rank does not leave `run` when interrupted       ->  it is at fault
    all ranks leave                                    ->  the one that stood still first is named, none is killed
    ... and the group hangs again at the same step     ->  the one named then is replaced

One rank that stands still stops all the others at their next collective. So the newest progress decides whether the
group hangs, and the oldest which rank is named.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from shoal_service.core.attempt.decision import Decision
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.health import Hang
from shoal_service.core.attempt.state.progress import ProgressStamp
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.messages import Phase, Progress

MEDIAN_OF = 32
"""Steps whose durations count for the median."""


@dataclass(frozen=True, slots=True)
class HangDecision(Decision):
    hang: Hang | None = None
    """Set if the group hangs."""


def progress_reported(turn: Turn, index: int, progress: Progress) -> None:
    """A stamp is kept when the progress counter of this generation has changed."""
    turn.progress = replace(turn.progress, answered_at={**turn.progress.answered_at, index: turn.now})
    if progress.generation != turn.group.generation or index not in turn.group.workers:
        return
    known = turn.progress.stamps.get(index)
    if known is None or progress.counter != known.counter or progress.step != known.step:
        stamp = ProgressStamp(
            counter=progress.counter,
            step=progress.step,
            phase=progress.phase,
            at=progress.at,
            seen_at=turn.now - progress.stalled_s,
        )
        turn.progress = replace(turn.progress, stamps={**turn.progress.stamps, index: stamp})


def find_hang(state: Attempt, now: float) -> HangDecision:
    """Whether no rank of a running group has made progress for too long, and which one stood still first."""
    in_run = state.in_run
    if state.stage not in (Stage.RUNNING, Stage.SWITCHING) or not in_run:
        return HangDecision(False, "no group is running")
    newest = max([state.progress.advanced_at, *(stamp.seen_at for stamp in state.progress.stamps.values())])
    threshold, why = _threshold(state, in_run)
    if now - newest <= threshold:
        return HangDecision(False, f"a rank made progress {now - newest:.1f} s ago ({why})")
    index = min(in_run, key=lambda i: _stood_still_at(state, i))
    reason = (
        f"no rank made progress for {now - newest:.1f} s ({why}); "
        f"rank {state.group.rank_of(index)} stood still first{_where(state, index)}"
    )
    known = state.health.hang
    is_repeated = known is not None and known.step == state.progress.step
    return HangDecision(True, reason, Hang(step=state.progress.step, index=index, is_repeated=is_repeated))


def unanswering(state: Attempt, now: float) -> frozenset[int]:
    """Workers of the group that have left one poll after the other unanswered, so an interrupt would not reach them
    either. Empty if all of them have: then the supervisor itself was cut off."""
    ages = {i: now - state.progress.answered_at[i] for i in state.group.workers if i in state.progress.answered_at}
    found = frozenset(i for i, age in ages.items() if age >= state.config.timeouts.silent_s)
    return found if len(found) < len(state.group.workers) else frozenset()


def collective_timeout_s(state: Attempt) -> float:
    """For the next group: later than its hang would be found."""
    health = state.target.spec.health
    slowest = max(state.progress.step_times, default=0.0)
    return max(state.config.timeouts.collective_s, 2 * health.hang_factor * slowest, 2 * health.hang_floor_s)


def _threshold(state: Attempt, in_run: tuple[int, ...]) -> tuple[float, str]:
    health = state.target.spec.health
    if any(state.progress.stamps[i].phase is Phase.SAVING for i in in_run if i in state.progress.stamps):
        return state.config.timeouts.switch_s, f"while it saves at most {state.config.timeouts.switch_s:g} s"
    median = statistics.median(state.progress.step_times) if state.progress.step_times else 0.0
    threshold = max(health.hang_factor * median, health.hang_floor_s)
    if not state.progress.stamps:
        threshold = max(threshold, state.config.timeouts.form_s)
        return threshold, f"no progress was reported since the group formed; at most {threshold:g} s"
    return threshold, (
        f"health.hang_factor {health.hang_factor:g} x {median:.3g} s, at least health.hang_floor_s "
        f"{health.hang_floor_s:g} s"
    )


def _stood_still_at(state: Attempt, index: int) -> tuple[int, float]:
    """Smaller: at an earlier step, or for longer; by its own clock, since polls are too coarse."""
    last = state.progress.stamps.get(index)
    return (last.step, last.at) if last is not None else (-1, 0.0)


def _where(state: Attempt, index: int) -> str:
    last = state.progress.stamps.get(index)
    return f", in {last.phase} after step {last.step}" if last is not None else ""
