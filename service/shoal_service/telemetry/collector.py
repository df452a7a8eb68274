"""Prometheus metrics, made at scrape time from one snapshot of the store, so the series of an ended job vanish.

The last snapshot is kept for a second, so that several scrapers cost one read. If the store does not answer, the
scrape fails (Prometheus shows `up 0`); old numbers are never shown as new ones. Called by `/metrics`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import (
    Metric as Family,
)
from prometheus_client.registry import Collector

from shoal_service.store import Store
from shoal_service.store.driving import MoveKind
from shoal_service.store.reads.metrics_snapshot import Snapshot
from shoal_service.store.reports import DropReason
from shoal_service.telemetry import metric_names as names
from shoal_service.telemetry.metric_names import Kind, LiveJob, Metric
from shoal_service.telemetry.request_metrics import RequestMetrics
from shoal_workers.contract.job import IncidentCause, JobState

_CACHE_S = 1.0
_Labels = tuple[str, ...]


def build_registry(store: Store, *, owner: str, requests: RequestMetrics) -> CollectorRegistry:
    """A new registry (never the global one) with everything that /metrics shows.

    `owner` is the name under which this control plane takes the lease.
    """
    registry = CollectorRegistry()
    registry.register(ShoalCollector(store, owner=owner, requests=requests))
    ProcessCollector(registry=registry)
    return registry


class ShoalCollector(Collector):
    def __init__(
        self,
        store: Store,
        *,
        owner: str,
        requests: RequestMetrics,
        clock: Callable[[], float] = time.time,
        clock_mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._owner = owner
        self._requests = requests
        self._clock = clock
        self._clock_mono = clock_mono
        self._lock = threading.Lock()
        self._cached: Snapshot | None = None
        self._cached_mono = 0.0

    def describe(self) -> Iterable[Family]:
        """All families, empty, since registering must not read the store."""
        return [_family(metric) for metric in names.ALL]

    def collect(self) -> Iterator[Family]:
        """Raises StoreUnavailable."""
        snapshot = self._snapshot()
        lease = snapshot.lease
        leads = lease is not None and lease.owner == self._owner and lease.expires_at > self._clock()
        yield _values(names.JOBS, {(s.value,): snapshot.jobs_by_state.get(s, 0) for s in JobState})
        yield from _job_families(snapshot.live)
        yield from self._scheduling_families(snapshot)
        yield _values(names.INCIDENTS, {(c.value,): snapshot.incidents_by_cause.get(c, 0) for c in IncidentCause})
        yield _histograms(
            names.RECOVERY_SECONDS,
            {(c.value, p.value): (h.counts, h.count, h.total) for (c, p), h in sorted(snapshot.recoveries.items())},
        )
        for metric, by_cause in (
            (names.INCIDENT_STEPS_LOST, snapshot.steps_lost),
            (names.INCIDENT_BYTES_MOVED, snapshot.bytes_moved),
        ):
            yield _histograms(metric, {(c.value,): (h.counts, h.count, h.total) for c, h in sorted(by_cause.items())})
        saved = snapshot.checkpoints
        yield _histograms(names.CHECKPOINT_SECONDS, {(): (saved.counts, saved.count, saved.total)})
        yield _values(names.LEASE_EPOCH, {(): lease.epoch if lease else 0})
        yield _values(names.CONTROL_PLANE_LEADER, {(): int(leads)})
        dropped = self._store.dropped()
        yield _values(names.REPORTS_DROPPED, {(reason.value,): dropped.get(reason, 0) for reason in DropReason})
        yield from self._http_families()

    def _scheduling_families(self, snapshot: Snapshot) -> Iterator[Family]:
        wait = snapshot.queue_wait
        yield _histograms(names.QUEUE_WAIT_SECONDS, {(): (wait.counts, wait.count, wait.total)})
        moves = self._store.moves()
        yield _values(names.SCHEDULER_MOVES, {(kind.value,): moves.get(kind, 0) for kind in MoveKind})
        yield _values(names.PROJECT_WORKERS, {(one.name,): one.workers for one in snapshot.projects})
        yield _values(names.PROJECT_SHARE, {(one.name,): one.share for one in snapshot.projects})
        yield _values(names.PROJECT_QUEUED_JOBS, {(one.name,): one.queued for one in snapshot.projects})

    def _http_families(self) -> Iterator[Family]:
        yield _values(names.HTTP_REQUESTS, dict(sorted(self._requests.requests().items())))
        rows: dict[_Labels, tuple[Sequence[int], int, float]] = {}
        for key, latency in sorted(self._requests.latencies().items()):
            cumulative = [sum(latency.counts[: i + 1]) for i in range(len(latency.counts))]
            rows[key] = (cumulative[:-1], cumulative[-1], latency.total_s)
        yield _histograms(names.HTTP_REQUEST_SECONDS, rows)

    def _snapshot(self) -> Snapshot:
        with self._lock:  # scrapes at the same time wait for one read
            now = self._clock_mono()
            if self._cached is None or now - self._cached_mono > _CACHE_S:
                self._cached = self._store.snapshot()
                self._cached_mono = now
            return self._cached


def _job_families(live: Sequence[LiveJob]) -> Iterator[Family]:
    for metric in names.ALL:
        if metric.of_job is None:
            continue
        values: dict[_Labels, float] = {}
        for job in live:
            value = metric.of_job(job)
            if isinstance(value, Mapping):
                values.update({(job.job_id, label): one for label, one in value.items()})
            elif value is not None:
                values[job.job_id,] = value
        yield _values(metric, values)


def _values(metric: Metric, values: Mapping[_Labels, float]) -> Family:
    family = _family(metric)
    assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histograms(metric: Metric, rows: Mapping[_Labels, tuple[Sequence[int], int, float]]) -> Family:
    """Each row: cumulative counts per bound, number of observations, their sum."""
    family = _family(metric)
    assert isinstance(family, HistogramMetricFamily)
    bounds = [str(float(bound)) for bound in metric.buckets]
    for labels, (cumulative, count, total) in rows.items():
        family.add_metric(labels, [*zip(bounds, cumulative, strict=True), ("+Inf", count)], total)
    return family


def _family(metric: Metric) -> Family:
    match metric.kind:
        case Kind.GAUGE:
            return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        case Kind.COUNTER:
            return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
