"""Pace: how often something is done whose cost grows with the number of workers, and that may be done a little later.

What takes no time is done at once, each time. What takes longer is done so rarely that it takes at most a tenth of the
time. Used by the executor for the status and for journal entries that no command follows from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal_service.clock import Clock

_CHEAP_S = 0.005
_SHARE = 0.1


class Pace:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cost_s = 0.0
        """Of the last time."""
        self._ended_mono = 0.0

    @property
    def is_due(self) -> bool:
        if self._cost_s < _CHEAP_S:
            return True
        return self._clock.monotonic() - self._ended_mono >= self._cost_s / _SHARE

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around the work."""
        began = self._clock.monotonic()
        yield
        self._ended_mono = self._clock.monotonic()
        self._cost_s = self._ended_mono - began
