"""How long a GPU computes, without waiting for it: the host only launches, so its own time says nothing.

    compute stream    | begin   micro-batches   | wait |   | wait |    end |   vote
    a step's seconds    from begin to end, without the parts between the two events around each wait

A wait is that for a collective of other ranks, which takes as long as the slowest of them. What FSDP gathers and sums
is waited for without a call that can be seen here, and counts as computing. Events are read one step late, when they
have long happened, so reading does not wait. Called by the trainer, the boundary of a loop and `Work.wait`, on the
training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A moment of a stream, as torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """True if it has happened."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds until another one that has happened."""
        ...


class DeviceClock:
    """The steps of one training thread."""

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._begun: Event | None = None
        self._waits: list[tuple[Event, Event]] = []
        self._done: tuple[Event, Event, list[tuple[Event, Event]]] | None = None
        """Begin, end and waits of the newest step that has ended."""

    def begin(self) -> None:
        """Called before a step launches anything."""
        self._begun, self._waits = self._recorded(), []

    def end(self) -> None:
        """Called when all of a step is launched that counts."""
        if self._begun is not None:
            self._done = self._begun, self._recorded(), self._waits
            self._begun = None

    def wait_begins(self) -> Event | None:
        """None outside of a step: such a wait does not count."""
        return self._recorded() if self._begun is not None else None

    def wait_ends(self, begun: Event) -> None:
        if self._begun is not None:
            self._waits.append((begun, self._recorded()))

    def take(self) -> float | None:
        """Seconds of the newest step, once. None if there was none since the last call, or the GPU is not so far."""
        if self._done is None or not self._done[1].query():
            return None
        (begun, ended, waits), self._done = self._done, None
        return (begun.elapsed_time(ended) - sum(a.elapsed_time(b) for a, b in waits)) / 1000

    def _recorded(self) -> Event:
        event = self._make_event()
        event.record()
        return event


def device_clock(device: torch.device) -> DeviceClock | None:
    """None on a CPU, where the thread's own time is that of the work."""
    if device.type != "cuda":
        return None
    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
