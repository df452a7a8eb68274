"""Pause, regain and steps lost, computed from the ends of steps and the time of a signal, for every system alike.

         signal                 end of the next completed step        first step beyond the one reached
step 16 ---|--x                  11   12   13   14   15   16   17
           |<------ pause + one step ->|                            here regain ends with step 17
           |<------ next step -------->|
           |<-------------------------------- regain --------------->|

`Aftermath` looks at a fixed window after the signal, which is the same for every system: how long until the group has
its old size again, and how much was trained. `control` looks at windows of the same length without a fault.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from measurements.stamps import StepEnd

_STEADY_STEPS = 6
"""Steps after the first one of a group from which its step time is computed."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    pause_s: float
    """From the signal to the end of the next group's first step, minus one median step at the new size."""
    next_step_s: float
    """From the signal to the end of the next group's first step; nothing is subtracted."""
    regain_s: float
    """From the signal to the end of the first step beyond the last one that was complete before the signal."""
    steps_lost: int
    """Complete steps that were repeated."""
    step_s: float
    """Median step of the next group."""
    from_world_size: int
    to_world_size: int


def is_over(steps: Sequence[StepEnd], signal_at: float) -> bool:
    """Whether the steps suffice for `measure`: training has passed the old step, and the new step time is known."""
    before, after = _parted(steps, signal_at)
    reached = max((one.step for one in before), default=0)
    return bool(after) and after[-1].step > reached and len(after) > _STEADY_STEPS


def measure(steps: Sequence[StepEnd], signal_at: float, quiet_step_s: Mapping[int, float] | None = None) -> Disturbance:
    """`steps` are ordered by time and satisfy `is_over`. `quiet_step_s`: median step by world size, measured without
    other load; where it is missing, the step time of the next group is used."""
    before, after = _parted(steps, signal_at)
    reached = max((one.step for one in before), default=0)
    first = after[0]
    passed = next(one for one in after if one.step > reached)
    step_s = (quiet_step_s or {}).get(first.world_size) or steady_step_s(steps, first)
    return Disturbance(
        pause_s=first.at - signal_at - step_s,
        next_step_s=first.at - signal_at,
        regain_s=passed.at - signal_at,
        steps_lost=max(0, reached - first.step + 1),
        step_s=step_s,
        from_world_size=before[-1].world_size if before else 0,
        to_world_size=first.world_size,
    )


def measure_switch(steps: Sequence[StepEnd], requested_at: float, to_world_size: int) -> Disturbance | None:
    """The cost of a requested change, during which the group trains until it switches. None: it has not switched yet.

    The pause is the time from the end of the old group's last step to the end of the new group's first step, minus one
    median step. `regain_s` is the time from the request to the end of that first step.
    """
    first = next((one for one in steps if one.at > requested_at and one.world_size == to_world_size), None)
    before = [one for one in steps if first is not None and one.at < first.at]
    if first is None or not before:
        return None
    step_s = steady_step_s(steps, first)
    return Disturbance(
        pause_s=first.at - before[-1].at - step_s,
        next_step_s=first.at - before[-1].at,
        regain_s=first.at - requested_at,
        steps_lost=max(0, max(one.step for one in before) - first.step + 1),
        step_s=step_s,
        from_world_size=before[-1].world_size,
        to_world_size=to_world_size,
    )


@dataclass(frozen=True, slots=True)
class Aftermath:
    """The `window_s` seconds after a signal."""

    window_s: float
    full_strength_s: float | None
    """From the signal to the end of the first step of a later group of the old size; None: not within the window."""
    new_sizes: tuple[int, ...]
    """World size of each step completed in the window beyond the last one that was complete before the signal; a
    repeated step adds nothing."""


def aftermath(steps: Sequence[StepEnd], signal_at: float, window_s: float) -> Aftermath:
    """`steps` are ordered by time and reach to the end of the window, or training has stopped."""
    before = [one for one in steps if one.at <= signal_at]
    _, later = _parted(steps, signal_at)
    size = before[-1].world_size if before else 0
    within = [one for one in steps if signal_at < one.at <= signal_at + window_s]
    reached = max((one.step for one in before), default=0)
    back = next((one for one in later if one.world_size >= size and one.at <= signal_at + window_s), None)
    return Aftermath(
        window_s=window_s,
        full_strength_s=None if back is None else back.at - signal_at,
        new_sizes=tuple({one.step: one.world_size for one in within if one.step > reached}.values()),
    )


@dataclass(frozen=True, slots=True)
class Control:
    """An undisturbed window."""

    longest_gap_s: float
    """The longest time without the end of a step, which is the length of the slowest step."""
    step_s: float
    """Median step."""
    new_steps: int


def control(steps: Sequence[StepEnd], since: float, window_s: float) -> Control:
    """`steps` reach to the end of the window. It begins with the last end of a step before `since`."""
    begun = [one for one in steps if one.at <= since][-1]
    within = [one for one in steps if begun.at <= one.at <= since + window_s]
    durations = _durations(within)
    return Control(
        longest_gap_s=longest_gap_s(within, begun.at, max(within[-1].at, begun.at + 1e-9)),
        step_s=statistics.median(durations) if durations else 0.0,
        new_steps=within[-1].step - begun.step,
    )


def longest_gap_s(steps: Sequence[StepEnd], since: float, until: float) -> float:
    """The longest time without the end of a step, between `since` and `until`."""
    ends = [since, *(one.at for one in steps if since < one.at < until), until]
    return max(b - a for a, b in pairwise(ends))


def steady_step_s(steps: Sequence[StepEnd], first: StepEnd) -> float:
    """Median step at the world size of `first`: of its own group if that has enough steps, else of all such groups."""
    own = [one for one in steps if one.life == first.life and one.at >= first.at]
    durations = _durations(own[: _STEADY_STEPS + 1])
    if len(durations) < _STEADY_STEPS // 2:
        durations = _durations([one for one in steps if one.world_size == first.world_size])
    return statistics.median(durations) if durations else 0.0


def _parted(steps: Sequence[StepEnd], signal_at: float) -> tuple[list[StepEnd], list[StepEnd]]:
    """Splits the steps into those before the fault and those of later groups. A step that the hit group still
    completes, since a killed worker takes a moment to die, counts as before."""
    before = [one for one in steps if one.at <= signal_at]
    hit = before[-1].life if before else ""
    before = [one for one in steps if one.at <= signal_at or one.life == hit]
    return before, [one for one in steps if one.at > signal_at and one.life != hit]


def _durations(steps: Sequence[StepEnd]) -> list[float]:
    """Durations of consecutive steps of one group. The start of a group's first step is not known."""
    return [b.at - a.at for a, b in pairwise(steps) if a.life == b.life and b.step == a.step + 1]
