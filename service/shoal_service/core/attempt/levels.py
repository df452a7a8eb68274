"""Which shard level is the fastest, if the planner cannot tell: it is measured, in the group that trains.

    the group has trained for timeouts.level_trial_s    the median of its last steps is noted, and the group switches to
                                                        a rival of its layout, which differs in the shard level only
    MEDIAN_OF steps later                               the next rival; after the last one the fastest level
    the group is lost in between                        that rival is not tried again

A switch is from memory, so no step is lost or repeated. What is known of levels holds for this attempt, and for each
number of workers separately. Called by `placement` and `switching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from shoal_service.core.attempt.hangs import MEDIAN_OF
from shoal_service.core.attempt.plan_layout import PlannedLayout
from shoal_service.core.attempt.state.attempt import Attempt, History, LevelTime
from shoal_service.core.attempt.state.stages import Running
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.training import LayoutMeasured
from shoal_workers.contract.layout import Layout

_CLEARLY_FASTER = 0.97
"""A level is left for one that needs at most this share of its step time, because medians of equally fast levels differ
too."""
_WORTH_STEPS = 20 * MEDIAN_OF
"""Least number of steps that must remain. With fewer, trying the other levels costs more than it could save."""


def preferred(state: Attempt, planned: PlannedLayout) -> PlannedLayout:
    """The planned layout, or the rival that is to be tried or is known to be faster. After an incident nothing is
    tried."""
    history = state.history
    options = {one.layout: one for one in (planned, *planned.rivals)}
    if history.trying in options and state.incident is None:
        return options[history.trying]
    return options[_fastest(history, [*options])]


def consider(turn: Turn) -> str:
    """Why the group stops at the next step boundary to go on at another shard level; empty: it does not. Called in
    RUNNING, when there is no other reason to switch."""
    running, group, history = turn.current, turn.group, turn.history
    if not isinstance(running, Running) or group.layout is None or turn.incident is not None:
        return ""
    if history.trying not in (None, group.layout):
        turn.history = history = _noted(history, history.trying, None)  # the group was lost, or has another size
    if turn.code.update is not None:
        return ""
    is_trial = history.trying is not None
    is_due = is_trial or turn.now - running.since >= turn.config.timeouts.level_trial_s
    if not is_due or turn.progress.step - group.start_step <= MEDIAN_OF:
        return ""
    unknown = [layout for layout in group.levels if layout not in _times(history)]
    if not unknown or len(group.levels) < 2:
        return ""
    if not is_trial and (history.total_steps or 0) - turn.progress.step < _WORTH_STEPS:
        return ""
    turn.history = history = _noted(history, group.layout, median(turn.progress.step_times))
    if left := [layout for layout in unknown if layout != group.layout]:
        turn.history = replace(history, trying=left[0])
        return f"to measure shard {left[0].shard}, whose steps may be faster than those of shard {group.layout.shard}"
    times, best = _times(history), _fastest(history, group.levels)
    known = {str(layout.shard): step_s for layout in group.levels if (step_s := times[layout]) is not None}
    turn.emit(LayoutMeasured(shard=best.shard, step_s=known))
    return f"shard {best.shard} is as fast as shard {group.layout.shard} or faster" if best != group.layout else ""


def _fastest(history: History, family: Sequence[Layout]) -> Layout:
    """The fastest layout of the family by the measured times; the first one if no other is clearly faster."""
    times, best = _times(history), family[0]
    for layout in family[1:]:
        step_s, best_s = times.get(layout), times.get(best)
        if step_s is not None and best_s is not None and step_s < _CLEARLY_FASTER * best_s:
            best = layout
    return best


def _times(history: History) -> dict[Layout, float | None]:
    return {one.layout: one.step_s for one in history.level_times}


def _noted(history: History, layout: Layout | None, step_s: float | None) -> History:
    """The history with the step time of this layout, which is not on trial any longer."""
    assert layout is not None
    others = tuple(one for one in history.level_times if one.layout != layout)
    return replace(history, level_times=(*others, LevelTime(layout=layout, step_s=step_s)), trying=None)
