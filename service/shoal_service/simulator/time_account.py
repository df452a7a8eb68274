"""Where the time of one job goes: the steps that count, those that were lost, and everything between them. Pure.

A group trains steps of a known duration from a known time on, so nothing is recorded while it does: its position
follows from the time. The steps become a segment when the speed changes or the group stops, and leave it again when a
later group begins at an earlier step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

_ROUNDING = 1e-9


class Term(NamedTuple):
    name: str
    meaning: str


TERMS = (
    Term("productive", "steps that no failure has undone, at full strength"),
    Term("degraded", "what they took longer with fewer nodes"),
    Term("slow", "what they took longer because of a slow node"),
    Term("snapshots", "copies of the state into memory and to buddies"),
    Term("lost", "steps that were done again, and the step that a failure broke"),
    Term("detect", "from a failure until the group is given up"),
    Term("grace", "after an exception: whether other ranks raise it too"),
    Term("leave", "until every rank has left the lost group, or was killed"),
    Term("wait", "for workers, or for snapshots of a node without workers"),
    Term("form", "orders to all ranks, and their connections"),
    Term("restore", "the state from memory or from storage"),
    Term("first_step", "what the first step of a group takes longer"),
    Term("switch", "planned re-formations: to grow, or to leave a node"),
    Term("storage", "searches for a checkpoint, and commits that are waited for"),
    Term("start", "the first group of an attempt"),
)


class _Segment(NamedTuple):
    first: float
    last: float
    layout_s: float
    snapshot_s: float
    step_s: float


@dataclass(slots=True)
class TimeAccount:
    ideal_s: float
    """Seconds of a step at full strength."""
    terms: dict[str, float] = field(default_factory=lambda: dict.fromkeys((term.name for term in TERMS), 0.0))
    """Seconds by the name of a term."""
    is_training: bool = False
    trains_from: float = math.inf
    """When the steps of this group, or of its newest segment, began."""
    step_s: float = math.inf
    """Seconds of a step now: those of the layout, with what snapshots and a slow node add."""
    layout_s: float = math.inf
    snapshot_s: float = 0.0
    steps_lost: float = 0.0
    _base: float = 0.0
    _segments: list[_Segment] = field(default_factory=list)

    def begin(self, step: int, at: float) -> None:
        """A group begins after this step, at this time. Later steps of groups before it are lost."""
        self.undo(step)
        self._base, self.trains_from, self.is_training = float(step), at, True

    def change_speed(self, now: float, layout_s: float, *, snapshot_s: float, slowdown: float = 1.0) -> None:
        self._cut(now)
        self.layout_s, self.snapshot_s, self.step_s = layout_s, snapshot_s, layout_s * slowdown + snapshot_s

    def position(self, at: float) -> float:
        """Return the completed steps, with the part of the current one."""
        return self._base + (max(0.0, at - self.trains_from) / self.step_s if self.is_training else 0.0)

    def count_steps(self, at: float) -> int:
        return math.floor(self.position(at) + _ROUNDING)

    def find_end(self, step: int) -> float:
        """Return when this step of the group ends."""
        return self.trains_from + (step - self._base) * self.step_s

    def stop(self, now: float) -> None:
        """The group trains no longer: the step that it was in is lost."""
        self._cut(now)
        self.is_training = False
        self.undo(self.count_steps(now))

    def undo(self, step: int) -> None:
        """The steps after this one are lost."""
        while self._segments and self._segments[-1].last > step:
            segment = self._segments.pop()
            first = max(segment.first, step)
            self.terms["lost"] += (segment.last - first) * segment.step_s
            self.steps_lost += segment.last - first
            if segment.first < step:
                self._segments.append(segment._replace(last=step))
        self._base = min(self._base, step)

    def settle(self) -> int:
        """Book the steps that count, and return their number. Called once, at the end."""
        for segment in self._segments:
            num = segment.last - segment.first
            self.terms["productive"] += num * self.ideal_s
            self.terms["degraded"] += num * (segment.layout_s - self.ideal_s)
            self.terms["snapshots"] += num * segment.snapshot_s
            self.terms["slow"] += num * (segment.step_s - segment.snapshot_s - segment.layout_s)
        return round(self._segments[-1].last) if self._segments else 0

    def _cut(self, now: float) -> None:
        position = self.position(now)
        if position > self._base:
            self._segments.append(_Segment(self._base, position, self.layout_s, self.snapshot_s, self.step_s))
        self._base, self.trains_from = position, max(self.trains_from, now)
