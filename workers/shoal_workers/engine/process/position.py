"""What the training thread is doing: read by the control thread, and by tests that inject a failure at an exact point.

The control thread sends it to the supervisor with every poll, which recognises a hang by a progress counter that stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shoal_workers.contract.messages import Phase, Progress, StepPart

PhaseHook = Callable[[Phase, int], None]
_PARTS = {
    Phase.FORWARD: StepPart.FORWARD,
    Phase.BACKWARD: StepPart.BACKWARD,
    Phase.OPTIMIZER: StepPart.OPTIMIZER,
    Phase.SNAPSHOT: StepPart.SNAPSHOT,
}
"""All other phases are OTHER."""


class _Now(NamedTuple):
    generation: int
    phase: Phase
    step: int
    note: str
    counter: int
    data_s: float
    at: float
    since_mono: float


class Position:
    """Written by the training thread only. One value is replaced as a whole, so a reader never sees half a change."""

    def __init__(self, on_phase: PhaseHook | None = None, waited_s: Callable[[], float] = lambda: 0.0) -> None:
        """`waited_s`: seconds that the calling thread has waited in collectives; called on the training thread."""
        self._on_phase = on_phase
        self._waited_s = waited_s
        self._seconds = dict.fromkeys(StepPart, 0.0)
        self._booked_mono = time.monotonic()
        self._booked_waited_s = 0.0
        self._data_s = 0.0
        self._watcher: Callable[[Phase], None] | None = None
        self._now = _Now(0, Phase.IDLE, 0, "", 0, 0.0, time.time(), time.monotonic())

    @property
    def phase(self) -> Phase:
        return self._now.phase

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._now.step

    def begin(self, generation: int) -> None:
        self._data_s = 0.0
        self._set(generation, Phase.IDLE, 0, "")

    def watch(self, watcher: Callable[[Phase], None] | None) -> None:
        """Training thread: `watcher` is called with each phase that is entered, until another one or None is set."""
        self._watcher = watcher

    def enter(self, phase: Phase) -> None:
        """The hook is called with the phase and the steps completed before it."""
        if self._watcher is not None:
            self._watcher(phase)
        now = self._now
        self._set(now.generation, phase, now.step, "")
        self._book(now.phase)
        if self._on_phase is not None:
            self._on_phase(phase, now.step)

    def reach(self, step: int) -> None:
        """Notes that `step` optimizer steps are completed."""
        self._set(self._now.generation, self._now.phase, step, self._now.note)

    def spent_on_data(self, seconds: float, *, in_phase: Phase = Phase.FORWARD) -> None:
        """All that this generation has spent on making batches; sent with the next change of the position.
        `in_phase`: the phase in which the batches since the call before were made."""
        more_s, self._data_s = seconds - self._data_s, seconds
        self._seconds[_PARTS.get(in_phase, StepPart.OTHER)] -= more_s
        self._seconds[StepPart.DATA] += more_s

    def part_seconds(self) -> Mapping[StepPart, float]:
        """Called from any thread: seconds that all phases that have ended in this process took, by what they were
        spent on."""
        return self._seconds.copy()

    def note(self, text: str) -> None:
        """Sets a note for people about the current phase; it counts as progress."""
        self._set(self._now.generation, self._now.phase, self._now.step, text)

    def progress(self) -> Progress:
        """Called from any thread."""
        now = self._now
        return Progress(
            generation=now.generation,
            phase=now.phase,
            step=now.step,
            at=now.at,
            note=now.note,
            counter=now.counter,
            stalled_s=time.monotonic() - now.since_mono,
            data_s=now.data_s,
        )

    def _book(self, ended: Phase) -> None:
        """Books the time since the last booking; waiting for others happens within the phases."""
        now_mono, waited_s = self._now.since_mono, self._waited_s()
        waiting_s = waited_s - self._booked_waited_s
        self._seconds[_PARTS.get(ended, StepPart.OTHER)] += now_mono - self._booked_mono - waiting_s
        self._seconds[StepPart.COMMUNICATION] += waiting_s
        self._booked_mono, self._booked_waited_s = now_mono, waited_s

    def _set(self, generation: int, phase: Phase, step: int, note: str) -> None:
        # Several times in each step: the document for the supervisor is made when it is asked for.
        counter = self._now.counter + 1
        self._now = _Now(generation, phase, step, note, counter, self._data_s, time.time(), time.monotonic())
