"""Recording: torch's profiler over some steps of this rank, and the engine's own clock of phases beside it.

    boundary | forward | backward | forward | backward | optimizer | snapshot | boundary
             |<------- seconds of one step; each moment belongs to one category ------->|

Hidden here: how the time of a step is divided. Waiting for others and making batches happen inside of the phases. Both
have counters, whose growth is taken out of the phase in which it happened. Training thread, except `save`, which may be
called on any thread once the recording has stopped. It starts and stops at step boundaries, enters no collective and
changes no number. Made by `Profiling`, which imports this module only then, because it loads torch's profiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from shoal_workers.contract.messages import Phase
from shoal_workers.contract.profiles import Category, ProfileRequest, StepTimes
from shoal_workers.engine.group.collectives import waited_s
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.profiling.digest import MARKS, RAW, Mark, Marks


class Recording:
    """Begins when it is made."""

    def __init__(
        self, request: ProfileRequest, position: Position, data_s: Callable[[], float], *, has_gpu: bool
    ) -> None:
        """`data_s`: seconds that the thread has spent on batches. Raises what torch's profiler raises."""
        start = time.perf_counter()
        self.request = request
        self._position = position
        devices = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
        self._profiler: Any = profile(activities=devices, profile_memory=True)
        self._profiler.start()
        self._clock = PhaseClock(lambda: Reading(time.perf_counter(), waited_s(), data_s()))
        self._began_s, self._began_ns = time.perf_counter(), time.time_ns()
        self.held_s = self._began_s - start
        """Seconds that start and stop took."""
        position.watch(self._clock.enter)

    @property
    def times(self) -> Sequence[StepTimes]:
        """Times of the steps so far."""
        return self._clock.times

    @property
    def is_complete(self) -> bool:
        return len(self._clock.times) >= self.request.steps

    def end_step(self, step: int) -> None:
        """Ends a step; `step` steps are completed."""
        self._clock.end_step(step)

    def stop(self) -> None:
        """Raises what torch's profiler raises."""
        self._position.watch(None)
        start = time.perf_counter()
        self._profiler.stop()
        self.held_s += time.perf_counter() - start

    def save(self, directory: Path, *, trace_name: str, memory_name: str) -> None:
        """Write the raw trace and what `digest` needs with it."""
        self._profiler.export_chrome_trace(str(directory / RAW))
        marks = Marks(
            steps=tuple(self._mark(span) for span in self._clock.steps),
            phases=tuple(self._mark(span) for span in self._clock.phases),
            trace_name=trace_name,
            memory_name=memory_name,
            max_file_bytes=self.request.max_file_bytes,
        )
        (directory / MARKS).write_text(marks.model_dump_json(), encoding="utf-8")

    def _mark(self, span: Span) -> Mark:
        return Mark(name=span.name, begin_ns=self._ns(span.begin_s), end_ns=self._ns(span.end_s))

    def _ns(self, at_s: float) -> int:
        return self._began_ns + round((at_s - self._began_s) * 1e9)


_CATEGORIES = {
    Phase.FORWARD: Category.COMPUTE,
    Phase.BACKWARD: Category.COMPUTE,
    Phase.OPTIMIZER: Category.OPTIMIZER,
    Phase.SNAPSHOT: Category.SNAPSHOT,
    Phase.SAVING: Category.CHECKPOINT,
    Phase.VALIDATING: Category.VALIDATION,
}
"""All other phases are OTHER."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The clocks of the training thread at one moment, in seconds."""

    at_s: float
    waited_s: float
    """Spent waiting in collectives since the thread began."""
    data_s: float
    """Spent making training batches since the generation began."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the time line, by the clock of `Reading.at_s`."""

    name: str
    begin_s: float
    end_s: float


class PhaseClock:
    """Made at a step boundary. Training thread only."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._last = read()
        self._phase: Phase | None = None
        self._seconds = dict.fromkeys(Category, 0.0)
        self._step_began_s = self._last.at_s
        self.times: list[StepTimes] = []
        self.phases: list[Span] = []
        self.steps: list[Span] = []
        """Named by the number of the step."""

    def enter(self, phase: Phase) -> None:
        """Counts the time from now on for this phase."""
        self._book()
        self._phase = phase

    def end_step(self, step: int) -> None:
        """A step boundary: `step` steps are completed, and the next one begins."""
        self._book()
        self._phase = None
        self.times.append(StepTimes(step=step, seconds=self._seconds))
        self.steps.append(Span(str(step), self._step_began_s, self._last.at_s))
        self._seconds = dict.fromkeys(Category, 0.0)
        self._step_began_s = self._last.at_s

    def _book(self) -> None:
        now, last = self._read(), self._last
        elapsed_s = now.at_s - last.at_s
        category = Category.OTHER if self._phase is None else _CATEGORIES.get(self._phase, Category.OTHER)
        if category is not Category.VALIDATION:
            waited_s, data_s = now.waited_s - last.waited_s, now.data_s - last.data_s
            self._seconds[Category.COMMUNICATION] += waited_s
            self._seconds[Category.DATA] += data_s
            elapsed_s = max(0.0, elapsed_s - waited_s - data_s)
        self._seconds[category] += elapsed_s
        if self._phase is not None:
            self.phases.append(Span(self._phase.value, last.at_s, now.at_s))
        self._last = now
