"""Pause, regain and steps lost, from the ends of steps and the time of a signal. Pure; every system goes through it.

         signal                 end of the next completed step        the step that was reached is passed
step 16 ---|--x                  11   12   13   14   15   16   17
           |<------ pause + one step ->|                            regain is up to the end of step 17 here
           |<-------------------------------- regain --------------->|
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from measurements.stamps import StepEnd

_STEADY_STEPS = 6
"""So many steps after the first of a group say how long a step takes there."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    pause_s: float
    """From the signal to the end of the next group's first step, minus one median step at the new size."""
    regain_s: float
    """From the signal until a step beyond the last one that was complete before it is complete."""
    steps_lost: int
    """Steps that were complete and were done again."""
    step_s: float
    """A median step of the group that came after."""
    from_world_size: int
    to_world_size: int


def is_over(steps: Sequence[StepEnd], signal_at: float) -> bool:
    """Whether enough is known: training has passed the old step, and the new group's pace can be told."""
    before, after = _parted(steps, signal_at)
    reached = max((one.step for one in before), default=0)
    return bool(after) and after[-1].step > reached and len(after) > _STEADY_STEPS


def measure(steps: Sequence[StepEnd], signal_at: float, quiet_step_s: Mapping[int, float] | None = None) -> Disturbance:
    """`steps` in the order of time, as `is_over` wants them. `quiet_step_s`: a median step by world size, where it was
    measured while nothing else went on; else it is that of the group that comes after."""
    before, after = _parted(steps, signal_at)
    reached = max((one.step for one in before), default=0)
    first = after[0]
    passed = next(one for one in after if one.step > reached)
    step_s = (quiet_step_s or {}).get(first.world_size) or steady_step_s(steps, first)
    return Disturbance(
        pause_s=first.at - signal_at - step_s,
        regain_s=passed.at - signal_at,
        steps_lost=max(0, reached - first.step + 1),
        step_s=step_s,
        from_world_size=before[-1].world_size if before else 0,
        to_world_size=first.world_size,
    )


def measure_switch(steps: Sequence[StepEnd], asked_at: float, to_world_size: int) -> Disturbance | None:
    """A change that was asked for: the group trains on until it switches. None: it has not switched yet.

    The pause is what lies between the last step of the old group and the end of the first of the new one, minus one
    median step; `regain_s` is from the asking to the end of that first step.
    """
    first = next((one for one in steps if one.at > asked_at and one.world_size == to_world_size), None)
    before = [one for one in steps if first is not None and one.at < first.at]
    if first is None or not before:
        return None
    step_s = steady_step_s(steps, first)
    return Disturbance(
        pause_s=first.at - before[-1].at - step_s,
        regain_s=first.at - asked_at,
        steps_lost=max(0, max(one.step for one in before) - first.step + 1),
        step_s=step_s,
        from_world_size=before[-1].world_size,
        to_world_size=to_world_size,
    )


def longest_gap_s(steps: Sequence[StepEnd], since: float, until: float) -> float:
    """The longest time without the end of a step, between two moments."""
    ends = [since, *(one.at for one in steps if since < one.at < until), until]
    return max(b - a for a, b in pairwise(ends))


def steady_step_s(steps: Sequence[StepEnd], first: StepEnd) -> float:
    """Median step at the size that `first` has: of its own group if that lives long enough, else of all such groups."""
    own = [one for one in steps if one.life == first.life and one.at >= first.at]
    durations = _durations(own[: _STEADY_STEPS + 1])
    if len(durations) < _STEADY_STEPS // 2:
        durations = _durations([one for one in steps if one.world_size == first.world_size])
    return statistics.median(durations) if durations else 0.0


def _parted(steps: Sequence[StepEnd], signal_at: float) -> tuple[list[StepEnd], list[StepEnd]]:
    """What was complete, and what the next group did. A step that the struck group still completes, because its member
    takes a moment to die, is no recovery."""
    before = [one for one in steps if one.at <= signal_at]
    struck = before[-1].life if before else ""
    before = [one for one in steps if one.at <= signal_at or one.life == struck]
    return before, [one for one in steps if one.at > signal_at and one.life != struck]


def _durations(steps: Sequence[StepEnd]) -> list[float]:
    """Of steps that follow each other in one group; a group's first step has no beginning that is known."""
    return [b.at - a.at for a, b in pairwise(steps) if a.life == b.life and b.step == a.step + 1]
