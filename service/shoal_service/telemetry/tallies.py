"""Counts and durations of this process, kept in memory from its start on: passes, webhooks, HTTP requests.

Prometheus expects that such counters begin at 0 with the process. Counts that must outlive the process are kept in the
store. All classes are thread-safe; each is written by the component that it counts.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from enum import StrEnum
from itertools import product

from shoal_service.core.webhooks import OF_JOBS
from shoal_service.telemetry.catalogue import (
    HTTP_REQUEST_SECONDS,
    SCHEDULER_DECIDE_SECONDS,
    SCHEDULER_PASS_SECONDS,
    WAIT_SECONDS,
    WEBHOOK_SECONDS,
    Histogram,
    Labels,
    Metric,
)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"
_MAX_ROUTES = 200


class Count:
    """Counts by labels."""

    def __init__(self, *zeros: Iterable[str]) -> None:
        """`zeros`: values of each label that count from 0 on; `increase()` sees the first one only after a 0."""
        self._lock = threading.Lock()
        self._counts: Counter[Labels] = Counter(dict.fromkeys(product(*zeros) if zeros else (), 0))

    def add(self, *labels: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[labels] += amount

    def values(self) -> dict[Labels, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))

    def value(self, *labels: str) -> int:
        with self._lock:
            return self._counts[labels]


class Durations:
    """A histogram of seconds, by labels."""

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.buckets
        self._lock = threading.Lock()
        self._counts: dict[Labels, list[int]] = {}
        self._totals: dict[Labels, float] = {}

    def observe(self, seconds: float, *labels: str) -> None:
        """Add an observation. An observation on a bound belongs to the bucket of that bound."""
        with self._lock:
            counts = self._counts.setdefault(labels, [0] * (len(self._bounds) + 1))
            counts[bisect_left(self._bounds, seconds)] += 1
            self._totals[labels] = self._totals.get(labels, 0.0) + seconds

    def values(self) -> dict[Labels, Histogram]:
        with self._lock:
            rows = [(labels, tuple(counts), self._totals[labels]) for labels, counts in sorted(self._counts.items())]
        return {labels: Histogram.from_buckets(counts, total) for labels, counts, total in rows}

    def value(self) -> Histogram:
        """Return the value of a histogram without labels; all zeros if it has observed nothing."""
        return self.values().get((), Histogram((0,) * len(self._bounds), 0, 0.0))


class PassTimes:
    """Durations of the control loop's passes and of its policy's decisions, and the number of failed passes."""

    def __init__(self) -> None:
        self.passes = Durations(SCHEDULER_PASS_SECONDS)
        self.decisions = Durations(SCHEDULER_DECIDE_SECONDS)
        self.failures = Count()


class WaitTallies:
    """Durations of waits for other machines, the bound of each kind, and how many waits reached it."""

    def __init__(self) -> None:
        self.seconds = Durations(WAIT_SECONDS)
        self.ended = Count()
        self.limits: dict[Labels, float] = {}
        """Bound of each kind, seconds."""

    def expect(self, what: str, limit_s: float) -> None:
        """Export a kind of wait from now on, with its bound."""
        self.limits[what,] = limit_s
        self.ended.add(what, amount=0)  # `increase()` sees the first one only after a 0

    @asynccontextmanager
    async def bounded(self, what: str, limit_s: float) -> AsyncIterator[None]:
        """Count a wait, and end it after `limit_s` seconds. Raises TimeoutError."""
        began_mono = time.monotonic()
        self.expect(what, limit_s)
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            self.ended.add(what)
            raise
        finally:
            self.seconds.observe(time.monotonic() - began_mono, what)


class DeliveryOutcome(StrEnum):
    """Outcome of an attempt, or of an event after its last attempt."""

    DELIVERED = "delivered"
    FAILED = "failed"
    GAVE_UP = "gave_up"


class WebhookTallies:
    """Attempts of this process to deliver webhooks: durations and outcomes."""

    def __init__(self, hooks: Iterable[str] = (), waits: WaitTallies | None = None) -> None:
        """`hooks`: names of the hooks of the settings. `waits`: counts the waits for receivers."""
        self.waits = waits or WaitTallies()
        self.hooks = (*sorted(hooks), OF_JOBS)
        self.seconds = Durations(WEBHOOK_SECONDS)
        self.outcomes = Count(self.hooks, DeliveryOutcome)


class Limit(StrEnum):
    """Why a request was refused. The status is 413 if it is too large, 503 or none for connections, else 429."""

    REQUESTS = "requests"
    FAILURES = "failures"
    STREAMS = "streams"
    UPLOADS = "uploads"
    AT_ONCE = "at_once"
    BODY_BYTES = "body_bytes"
    ARCHIVE_BYTES = "archive_bytes"
    CONNECTIONS = "connections"


class RequestMetrics:
    """Counts and times HTTP requests, and counts the open streams.

    The number of series is bounded: methods outside the closed set and routes beyond a limit are counted as "other".
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: set[str] = set()
        self.streams = Count()
        """Open streams."""
        self.finished = Count()
        """Finished requests by method, route and class of status."""
        self.refusals = Count(Limit)
        """Refused requests by limit."""
        self.latencies = Durations(HTTP_REQUEST_SECONDS)
        """By method and route."""

    def observe(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """Count a finished request.

        Args:
            route: the template, never the path.
            status: 0 if no answer was started.
            seconds: None for a stream or a long poll, which lasts as long as its client waits.
        """
        method = method if method in _METHODS else _OTHER  # a client may send any word, and each would be a series
        status_class = f"{status // 100}xx" if 100 <= status < 600 else "none"
        with self._lock:
            if len(self._routes) < _MAX_ROUTES:
                self._routes.add(route)
            route = route if route in self._routes else _OTHER
        self.finished.add(method, route, status_class)
        if seconds is not None:
            self.latencies.observe(seconds, method, route)
