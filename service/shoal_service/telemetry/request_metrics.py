"""Counts and times HTTP requests, and counts the open streams. Called by the HTTP edge.

The number of series is bounded: methods outside the closed set and routes beyond a limit are counted as "other".
"""

from __future__ import annotations

import threading
from enum import StrEnum

from shoal_service.telemetry.metric import Histogram
from shoal_service.telemetry.service_metrics import HTTP_REQUEST_SECONDS
from shoal_service.telemetry.tallies import Count, Durations

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"
_MAX_ROUTES = 200


class Limit(StrEnum):
    """What a request was refused for: with 413 if it is too large, with 503 or none for connections, else with 429."""

    REQUESTS = "requests"
    FAILURES = "failures"
    STREAMS = "streams"
    UPLOADS = "uploads"
    AT_ONCE = "at_once"
    BODY_BYTES = "body_bytes"
    ARCHIVE_BYTES = "archive_bytes"
    CONNECTIONS = "connections"


class RequestMetrics:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: set[str] = set()
        self._num_streams = 0
        self._requests = Count()
        self._refused = Count()
        self._latencies = Durations(HTTP_REQUEST_SECONDS)

    def observe(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """A finished request.

        Args:
            route: the template, never the path.
            status: 0: no answer was started.
            seconds: None: a stream or a long poll, which lasts as long as its client waits.
        """
        method = method if method in _METHODS else _OTHER
        status_class = f"{status // 100}xx" if 100 <= status < 600 else "none"
        with self._lock:
            if route not in self._routes:
                if len(self._routes) < _MAX_ROUTES:
                    self._routes.add(route)
                else:
                    route = _OTHER
        self._requests.add(method, route, status_class)
        if seconds is not None:
            self._latencies.observe(seconds, method, route)

    def refused(self, limit: Limit) -> None:
        """A request was answered with 429."""
        self._refused.add(limit.value)

    def refusals(self) -> dict[tuple[str, ...], int]:
        """By limit; each of them is there."""
        return {(limit.value,): 0 for limit in Limit} | self._refused.values()

    def stream_opened(self) -> None:
        with self._lock:
            self._num_streams += 1

    def stream_closed(self) -> None:
        with self._lock:
            self._num_streams -= 1

    @property
    def num_streams(self) -> int:
        """Open streams."""
        return self._num_streams

    def requests(self) -> dict[tuple[str, ...], int]:
        """By method, route and class of status."""
        return self._requests.values()

    def latencies(self) -> dict[tuple[str, ...], Histogram]:
        """By method and route."""
        return self._latencies.values()
