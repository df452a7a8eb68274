"""Recording: torch's profiler over some steps of this rank, and the engine's own clock of phases beside it.

Training thread, except `save`, which may be called on any thread once the recording has stopped. It starts and stops at
step boundaries, enters no collective and changes no number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from shoal_workers.contract.profiling.messages import ProfileRequest, StepTimes
from shoal_workers.engine.group.collectives import waited_s
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.profiling.digest import MARKS, RAW, Mark, Marks
from shoal_workers.engine.profiling.phase_clock import PhaseClock, Reading, Span


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
        """Of the steps so far."""
        return self._clock.times

    @property
    def is_complete(self) -> bool:
        return len(self._clock.times) >= self.request.steps

    def end_step(self, step: int) -> None:
        """`step` steps are completed."""
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
