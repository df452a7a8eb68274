"""Seconds that a GPU computes in a step, without what it waits for other ranks, read when they are known anyway."""

from __future__ import annotations

from shoal_workers.engine.group.device_clock import DeviceClock, Event


class _Stream:
    """A GPU that does what is launched when the test says so. Its events have the times at which they happen."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._launched: list[float | _Event] = []

    def event(self) -> _Event:
        return _Event(self)

    def launch(self, milliseconds: float) -> None:
        self._launched.append(milliseconds)

    def mark(self, event: _Event) -> None:
        self._launched.append(event)

    def run(self) -> None:
        for item in self._launched:
            if isinstance(item, _Event):
                item.at_ms = self.now_ms
            else:
                self.now_ms += item
        self._launched = []


class _Event:
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self.at_ms: float | None = None

    def record(self) -> None:
        self._stream.mark(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end_event: Event) -> float:
        assert isinstance(end_event, _Event)
        assert self.at_ms is not None and end_event.at_ms is not None
        return end_event.at_ms - self.at_ms


def _step(clock: DeviceClock, stream: _Stream, *, compute_ms: float, wait_ms: float) -> None:
    clock.begin()
    stream.launch(compute_ms / 2)
    waiting = clock.wait_begins()
    assert waiting is not None
    stream.launch(wait_ms)
    clock.wait_ends(waiting)
    stream.launch(compute_ms / 2)
    clock.end()


def test_waits_for_other_ranks_do_not_count() -> None:
    stream = _Stream()
    clock = DeviceClock(stream.event)
    _step(clock, stream, compute_ms=40, wait_ms=500)
    stream.run()
    assert clock.take() == 0.04


def test_a_step_is_read_once_and_not_before_the_gpu_has_ended_it() -> None:
    stream = _Stream()
    clock = DeviceClock(stream.event)
    assert clock.take() is None
    _step(clock, stream, compute_ms=40, wait_ms=0)
    assert clock.take() is None, "the host is ahead of the GPU"
    stream.run()
    _step(clock, stream, compute_ms=80, wait_ms=10)
    assert clock.take() is None, "the newest step is not done"
    stream.run()
    assert (clock.take(), clock.take()) == (0.08, None)


def test_a_wait_outside_of_a_step_is_not_taken_from_it() -> None:
    """The vote's own, and what is exchanged between two steps."""
    stream = _Stream()
    clock = DeviceClock(stream.event)
    _step(clock, stream, compute_ms=40, wait_ms=10)
    assert clock.wait_begins() is None
    stream.launch(300)
    stream.run()
    assert clock.take() == 0.04
