"""MetricBacklog: the points that the metrics hook of a job has not logged yet. Pure data.

The reporter adds points, the MetricsForwarder takes them out. Worker clients keep the reports on their workers until
they are settled here, so that a restarted supervisor gets them again.
"""

from __future__ import annotations

from collections import deque

from shoal_service.supervisor.reporting.scalars import scalars
from shoal_service.views import SeriesPoint
from shoal_workers.contract.metrics.messages import MetricPoint

_MOST = 10_000
"""Points; while the hook fails for longer, the oldest are dropped."""


class MetricBacklog:
    def __init__(self, *, is_used: bool, most: int = _MOST) -> None:
        """`is_used`: the job has a hook. Otherwise nothing is kept."""
        self._is_used = is_used
        self._most = most
        self._points: deque[MetricPoint] = deque()
        self.added = 0
        """Number of the last point."""
        self.num_dropped = 0

    @property
    def settled(self) -> int:
        """All points up to this number are logged, or were dropped."""
        return self._points[0].seq - 1 if self._points else self.added

    @property
    def num_waiting(self) -> int:
        return len(self._points)

    def add(self, point: SeriesPoint) -> None:
        if not self._is_used:
            return
        self.added += 1
        self._points.append(MetricPoint(seq=self.added, step=point.step, at=point.at, values=dict(scalars(point))))
        if len(self._points) > self._most:
            self._points.popleft()
            self.num_dropped += 1

    def first(self, num: int) -> tuple[MetricPoint, ...]:
        """The oldest ones."""
        return tuple(self._points[i] for i in range(min(num, len(self._points))))

    def logged(self, seq: int) -> None:
        """All points up to this number."""
        while self._points and self._points[0].seq <= seq:
            self._points.popleft()
