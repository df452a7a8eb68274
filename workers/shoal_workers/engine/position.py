"""Where the training thread stands, for the control thread to read and for tests to strike at exactly one point."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal_workers.contract.messages import Phase, Progress

PhaseHook = Callable[[Phase, int], None]


class Position:
    """Written by the training thread only. One tuple is swapped as a whole, so a reader never sees half a change."""

    def __init__(self, on_phase: PhaseHook | None = None) -> None:
        self._on_phase = on_phase
        self._now = (0, Phase.IDLE, 0, time.time(), "")
        self._beat = 0

    @property
    def phase(self) -> Phase:
        return self._now[1]

    @property
    def step(self) -> int:
        """Optimizer steps that are completed."""
        return self._now[2]

    def begin(self, generation: int) -> None:
        self._now = (generation, Phase.IDLE, 0, time.time(), "")

    def enter(self, phase: Phase) -> None:
        """The hook is called with the phase and the steps completed before it."""
        generation, _, step, _, _ = self._now
        self._beat += 1
        self._now = (generation, phase, step, time.time(), "")
        if self._on_phase is not None:
            self._on_phase(phase, step)

    def reach(self, step: int) -> None:
        """`step` optimizer steps are completed."""
        generation, phase, _, _, note = self._now
        self._beat += 1
        self._now = (generation, phase, step, time.time(), note)

    def note(self, text: str) -> None:
        generation, phase, step, _, _ = self._now
        self._beat += 1
        self._now = (generation, phase, step, time.time(), text)

    def progress(self) -> Progress:
        generation, phase, step, at, note = self._now
        return Progress(generation=generation, phase=phase, step=step, at=at, note=note, beat=self._beat)
