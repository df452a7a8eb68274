"""Keeps the garbage collector from taking much time. It is paused around a short computation that makes many objects
and no cycles, as a decision and a scrape do. It leaves out the objects that a process made at its start. It runs rarely
in a process whose objects make few cycles.

A scheduling decision for 10,000 jobs makes about 80,000 objects. They are freed when it is done, without the collector;
but meanwhile they trigger passes over the whole heap, which take as long as the decision itself.
A queue of 20,000 jobs is some two million objects that stay, and a pass over them stops the whole process for most of a
second: `SparedJobs` keeps the collector from them.
Called by the control loop, the exposition of metrics, supervisors, and by benchmarks, which measure what the service
pays.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Pauses:
    """The pauses of the collector in this process that go on now."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    count: int = 0
    was_on: bool = True


_PAUSES = _Pauses()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses the collector in a block. Cycles of any thread stay until the last of the blocks that threads are in at
    the same time has ended."""
    with _PAUSES.lock:
        if not _PAUSES.count:
            _PAUSES.was_on = gc.isenabled()
            gc.disable()
        _PAUSES.count += 1
    try:
        yield
    finally:
        with _PAUSES.lock:
            _PAUSES.count -= 1
            if not _PAUSES.count and _PAUSES.was_on:
                gc.enable()


def collect_rarely(every: int = 10_000_000) -> None:
    """Makes passes over all objects rare, about one in `every` new objects that stay, and spares what exists. Call it
    once, when the process has started.

    It is for processes that run for weeks and whose objects make few cycles. A pass over everything stops all threads:
    those of a supervisor, and in the control plane for 0.2 s beside 200 jobs. There, connections leave cycles, so it is
    called with OF_CONTROL_PLANE.
    """
    spare_what_exists()
    gc.set_threshold(10_000, 5, every // 50_000)


OF_CONTROL_PLANE = 1_000_000
"""Value of `every` in the control plane."""


def spare_what_exists() -> None:
    """Makes later passes leave out what there is now, modules above all, which stays as long as the process. Call it
    once, when the process has started."""
    gc.collect()
    gc.freeze()


SPARED_AT_ONCE = 1_000
"""Number of new jobs. A pass over the objects of fewer takes some 0.05 s."""


class SparedJobs:
    """Makes the passes of the collector leave out the jobs that a process keeps. These objects are still freed with
    their last reference; only a cycle among what existed then would stay, until the jobs are half as many."""

    def __init__(self) -> None:
        self._num_new = 0
        self._num_spared = 0
        """Number of jobs that were kept when they were last left out; 0: they are not left out."""

    def note(self, num_new: int, num_kept: int) -> None:
        """Call it after each reading. It collects the rest of the heap once per `SPARED_AT_ONCE` new jobs.

        Args:
            num_new: jobs that the reading before did not have.
            num_kept: all jobs that are kept now.
        """
        self._num_new += num_new
        if num_kept < self._num_spared / 2:
            self._num_spared = 0
            gc.unfreeze()
        if self._num_new >= SPARED_AT_ONCE:
            self._num_new, self._num_spared = 0, num_kept
            spare_what_exists()
