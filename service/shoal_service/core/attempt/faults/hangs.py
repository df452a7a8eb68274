"""Hangs: no member gets anywhere for longer than the group's own pace allows. Pure, but for taking down the beats.

    threshold = max(health.hang_factor x median step, health.hang_floor_s)
    newest sign of life of any member older than that     ->  the group hangs
    somebody does not leave `run` when interrupted        ->  that one is the culprit
    everybody leaves                                      ->  the one that stood still first is named, nobody is killed
    ... and it hangs again at the same step               ->  the one named then is replaced

One member that stands still stops all the others at their next collective, so the newest sign is what counts, and the
oldest is whom it names.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.health import Hang
from shoal_service.core.attempt.state.progress import ProgressStamp
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.messages import Phase, Progress

MEDIAN_OF = 32
"""Steps."""


def beat(turn: Turn, index: int, progress: Progress) -> None:
    """A beat counts when it has changed, for this generation."""
    state = turn.state
    turn.progress = replace(turn.progress, answered_at={**turn.progress.answered_at, index: turn.now})
    known = state.progress.stamps.get(index)
    if progress.generation != state.group.generation or index not in state.group.workers:
        return
    if known is None or progress.counter != known.counter or progress.step != known.step:
        last = ProgressStamp(
            counter=progress.counter, step=progress.step, phase=progress.phase, at=progress.at,
            seen_at=turn.now - progress.stalled_s,
        )  # fmt: skip
        turn.progress = replace(turn.progress, stamps={**turn.progress.stamps, index: last})


def find_hang(state: Attempt, now: float) -> tuple[str, Hang] | None:
    """What to say, and whom it points at; None: somebody got somewhere not long ago."""
    if state.stage not in (Stage.RUNNING, Stage.SWITCHING) or not state.in_run:
        return None
    newest = max([state.progress.advanced_at, *(b.seen_at for b in state.progress.stamps.values())])
    threshold, why = _threshold(state)
    if now - newest <= threshold:
        return None
    index = min(state.in_run, key=lambda i: _standing(state, i))
    message = (
        f"no rank got anywhere for {now - newest:.1f} s ({why}); "
        f"rank {state.group.rank_of(index)} stood still first{_where(state, index)}"
    )
    repeated = state.health.hang is not None and state.health.hang.step == state.progress.step
    return message, Hang(step=state.progress.step, index=index, is_repeated=repeated)


def silent(state: Attempt, now: float) -> frozenset[int]:
    """Members that have left one poll after the other unanswered: no use to ask them whether they hear. Nobody, if all
    have: then it is not they who do not hear."""
    ages = {i: now - state.progress.answered_at[i] for i in state.group.workers if i in state.progress.answered_at}
    found = frozenset(i for i, age in ages.items() if age >= state.config.timeouts.silent_s)
    return found if len(found) < len(state.group.workers) else frozenset()


def collective_timeout_s(state: Attempt) -> float:
    """For the next group: never before its hang would have been found."""
    health = state.target.spec.health
    slowest = max(state.progress.step_times, default=0.0)
    return max(state.config.timeouts.collective_s, 2 * health.hang_factor * slowest, 2 * health.hang_floor_s)


def _threshold(state: Attempt) -> tuple[float, str]:
    health = state.target.spec.health
    if any(state.progress.stamps[i].phase is Phase.SAVING for i in state.in_run if i in state.progress.stamps):
        return state.config.timeouts.switch_s, f"while it saves at most {state.config.timeouts.switch_s:g} s"
    median = statistics.median(state.progress.step_times) if state.progress.step_times else 0.0
    threshold = max(health.hang_factor * median, health.hang_floor_s)
    if not state.progress.stamps:
        threshold = max(threshold, state.config.timeouts.form_s)
        return threshold, f"no beat was acknowledged since the group formed; at most {threshold:g} s"
    return threshold, (
        f"health.hang_factor {health.hang_factor:g} x {median:.3g} s, at least health.hang_floor_s "
        f"{health.hang_floor_s:g} s"
    )


def _standing(state: Attempt, index: int) -> tuple[int, float]:
    """Smaller: it stands still at an earlier step, or since longer ago; by its own clock, as polls are too coarse."""
    last = state.progress.stamps.get(index)
    return (last.step, last.at) if last is not None else (-1, 0.0)


def _where(state: Attempt, index: int) -> str:
    last = state.progress.stamps.get(index)
    return f", in {last.phase} after step {last.step}" if last is not None else ""
