"""How often a thing may be done so that it costs no more than its share of the training time. Pure.

Costs and step times are measured while training, because they change with the world size and with other load on the
machine. Moving averages keep a single outlier from changing the pace. The first costs of a generation include cold
memory (two slots are used in turn) and are not counted. Called by `Snapshots`.
"""

from __future__ import annotations

import math

_EMA = 0.2
_FINENESS = 4
"""Paces are multiples of a quarter of a step, so that they change rarely."""
_NUM_COLD = 2
_CALM = 1.25
"""A pace stays until the budget requires one that differs by more than this factor: it would alternate otherwise."""
_COPIES = 0.8
"""Largest share of the snapshot budget for copies. They go first: they outlive any worker, and only a node's loss loses
them."""


class Pace:
    """`every_steps` follows from the noted costs; 2.5 means 2 and 3 in turn. A new `budget` applies from the next
    note."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._step_s: float | None = None
        self._cost_s: float | None = None
        self._num_costs = 0
        self.every_steps = 1.0
        self._is_held = False
        self._due = 0.0

    @property
    def cost_s(self) -> float:
        """Moving average; 0 before the first."""
        return self._cost_s or 0.0

    @property
    def share(self) -> float:
        """Share of the step time, at this pace."""
        return self.cost_s / (self._step_s * self.every_steps) if self._step_s else 0.0

    def hold(self) -> None:
        """From now on it is done every step, whatever it costs."""
        self.every_steps, self._is_held = 1.0, True

    def release(self) -> None:
        """After `hold`: from now on it is done as seldom as the budget requires."""
        self._is_held = False

    def is_due(self, step: int) -> bool:
        return step >= self._due

    def done(self, step: int) -> None:
        """It was done after this step. If it was late by less than a step, the next is not delayed."""
        self._due = (self._due if 0 <= step - self._due < 1 else step) + self.every_steps

    def note_step(self, step_s: float) -> None:
        self._step_s = _blend(self._step_s, step_s)
        self._adapt()

    def note_cost(self, cost_s: float) -> None:
        self._num_costs += 1
        if self._num_costs > _NUM_COLD:
            self._cost_s = _blend(self._cost_s, cost_s)
            self._adapt()

    def _adapt(self) -> None:
        if not self._step_s or not self._cost_s or self._is_held:
            return
        desired = self._cost_s / (self.budget * self._step_s)
        if not self.every_steps / _CALM < max(1.0, desired) <= self.every_steps:
            self.every_steps = max(1.0, math.ceil(_FINENESS * desired) / _FINENESS)


class SnapshotPace:
    """The paces of copies into memory and of sends to the buddy, which share one budget."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self.copies = Pace(budget * _COPIES)
        self.sends = Pace(budget)

    @property
    def share(self) -> float:
        """Share of the step time, for both."""
        return self.copies.share + self.sends.share

    def note(self, step_s: float, copy_s: float, send_s: float) -> None:
        """Once per step; a cost of 0: there was none."""
        for pace, cost_s in ((self.copies, copy_s), (self.sends, send_s)):
            pace.note_step(step_s)
            if cost_s:
                pace.note_cost(cost_s)
        self.sends.budget = max(self._budget * (1 - _COPIES), self._budget - self.copies.share)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else (1 - _EMA) * average + _EMA * value
