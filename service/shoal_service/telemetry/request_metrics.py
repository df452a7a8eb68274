"""Counts and times HTTP requests. The edge calls `observe` once per finished request; the collector reads the counts.

The number of series is bounded: methods outside the closed set and routes beyond a limit are counted as "other".
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

from shoal_service.telemetry.metric_names import HTTP_REQUEST_SECONDS

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"
_MAX_ROUTES = 200
_NUM_BUCKETS = len(HTTP_REQUEST_SECONDS.buckets) + 1


@dataclass(frozen=True, slots=True)
class Latency:
    """Requests of one method and route. `counts` are per bucket; the last bucket is above all bounds."""

    counts: tuple[int, ...]
    total_s: float


class RequestMetrics:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: set[str] = set()
        self._requests: dict[tuple[str, str, str], int] = {}
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._totals: dict[tuple[str, str], float] = {}

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """`route` is the template, never the path. `status` 0: no answer was started."""
        method = method if method in _METHODS else _OTHER
        status_class = f"{status // 100}xx" if 100 <= status < 600 else "none"
        with self._lock:
            if route not in self._routes:
                if len(self._routes) < _MAX_ROUTES:
                    self._routes.add(route)
                else:
                    route = _OTHER
            key = (method, route)
            self._requests[*key, status_class] = self._requests.get((*key, status_class), 0) + 1
            counts = self._counts.setdefault(key, [0] * _NUM_BUCKETS)
            counts[bisect_left(HTTP_REQUEST_SECONDS.buckets, seconds)] += 1
            self._totals[key] = self._totals.get(key, 0.0) + seconds

    def requests(self) -> dict[tuple[str, str, str], int]:
        """By method, route and class of status."""
        with self._lock:
            return dict(self._requests)

    def latencies(self) -> dict[tuple[str, str], Latency]:
        """By method and route."""
        with self._lock:
            return {key: Latency(tuple(counts), self._totals[key]) for key, counts in self._counts.items()}
