"""Exposition: the answer of /metrics, made at the time of the scrape from one snapshot of the store and from memory.

    catalogue.py       declares the metrics of a job, and how their values are found in a `LiveJob`
    a metric of a job  `_JobSeries`: only the values that have changed since the last scrape become lines again
    any other metric   a row of `OF_SERVICE`, with its values from the snapshot, the clusters and what this process has
                       counted
    text_format.py     writes a metric and its values as lines

The snapshot is kept for a second, so that several scrapers cost one read. If the store does not answer, the scrape
fails (Prometheus shows `up 0`); old numbers are never shown as new ones. Nothing here asks Ray: the cluster is shown
as the control loop saw it last. A closed set of label values is shown in full from the start: `increase()` sees the
first incident of a cause only if its counter was 0 before. Called by the HTTP edge, on worker threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from shoal_service.collector import paused_collector
from shoal_service.core import retention
from shoal_service.fleet_views import ClusterView, NodeView
from shoal_service.planner import HardwareProfile
from shoal_service.planner.shape import shape_of
from shoal_service.store import Store, metrics_snapshot
from shoal_service.store.backup import newest_backup_at
from shoal_service.store.database import DatabaseTallies
from shoal_service.store.driving import MoveKind
from shoal_service.store.metrics_snapshot import Snapshot
from shoal_service.store.reporting import DropReason
from shoal_service.store.webhook_lanes import WebhookLag
from shoal_service.telemetry.catalogue import (
    CHECKPOINT_SECONDS,
    DATABASE_SECONDS,
    HTTP_REQUEST_SECONDS,
    INCIDENT_BYTES_MOVED,
    INCIDENT_STEPS_LOST,
    JOB_MFU,
    OF_JOBS,
    QUEUE_WAIT_SECONDS,
    RECOVERY_SECONDS,
    SCHEDULER_DECIDE_SECONDS,
    SCHEDULER_PASS_SECONDS,
    WAIT_SECONDS,
    WEBHOOK_SECONDS,
    Histogram,
    Kind,
    Labels,
    LiveJob,
    Metric,
    RecoveryPhase,
    Value,
)
from shoal_service.telemetry.tallies import Count, PassTimes, RequestMetrics, WaitTallies, WebhookTallies
from shoal_service.telemetry.text_format import (
    OPENMETRICS,
    Exemplars,
    choose_media_type,
    format_family,
    format_header,
    format_series,
)
from shoal_workers.contract import IncidentCause, JobSpec, JobState, WorkerUse

ProfileOf = Callable[[JobSpec], HardwareProfile]
"""The profile with which the planner plans the job."""
NODE_STATES = ("ready", "draining", "drained", "probation", "dead")
_CACHE_S = 1.0
_END = b"# EOF\n"
_VALUES = [metric.of_job for metric in OF_JOBS if metric.of_job is not None]
_MFU = OF_JOBS.index(JOB_MFU)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the numbers come from."""

    store: Store
    owner: str
    """Name under which this control plane takes the lease."""
    requests: RequestMetrics
    passes: PassTimes
    cluster: Callable[[], ClusterView]
    """Answers from memory."""
    profile_of: ProfileOf
    state_dir: Path
    webhooks: WebhookTallies = field(default_factory=WebhookTallies)
    removals: Count = field(default_factory=lambda: Count(retention.Kind))
    """What this process has deleted, by kind."""
    waits: WaitTallies = field(default_factory=WaitTallies)


class Exposition:
    """Thread-safe."""

    def __init__(
        self,
        sources: Sources,
        *,
        clock: Callable[[], float] = time.time,
        clock_mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._clock_mono = clock_mono
        self._jobs = _JobSeries(sources.profile_of)
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._lock = threading.Lock()
        self._cached: Snapshot | None = None
        self._cached_mono = 0.0
        self._live = metrics_snapshot.LiveJobs()

    @paused_collector()
    def render(self, accept: str, projects: Collection[str] | None = None) -> tuple[bytes, str]:
        """Returns the body and its media type: OpenMetrics if the scraper's `Accept` prefers that.

        Args:
            projects: only the metrics of these projects and of their jobs are shown; None means all metrics.

        Raises:
            StoreUnavailable
        """
        media_type = choose_media_type(accept)
        openmetrics = media_type == OPENMETRICS
        scrape = Scrape(self._read_snapshot(), self._sources, self._clock())
        live, jobs = scrape.snapshot.live, self._jobs
        if projects is not None:
            live = tuple(job for job in live if job.spec.project in projects)
            jobs = _JobSeries(self._sources.profile_of)  # the lines that are kept are for users who see all projects
        parts = [jobs.text(live, openmetrics=openmetrics)]
        for metric, values in OF_SERVICE:
            if projects is None or metric.labels == ("project",):
                rows = values(scrape)
                rows = rows if isinstance(rows, Mapping) else {(): rows}
                if projects is not None:
                    rows = {labels: value for labels, value in rows.items() if labels[0] in projects}
                exemplars = _find_exemplars(metric, scrape.tallies)
                parts.append(format_family(metric, rows, openmetrics=openmetrics, exemplars=exemplars))
        if projects is None:
            encode: Callable[[CollectorRegistry], bytes] = generate_openmetrics if openmetrics else generate_latest
            parts.append(encode(self._process).removesuffix(_END).decode())  # it ends the whole body, and no part of it
        body = "".join(parts).encode()
        return (body + _END if openmetrics else body), media_type

    def _read_snapshot(self) -> Snapshot:
        with self._lock:  # scrapes at the same time wait for one read
            now = self._clock_mono()
            if self._cached is None or now - self._cached_mono > _CACHE_S:
                with self._sources.store.read() as tx:
                    self._cached = metrics_snapshot.read(tx, self._live, now=self._clock())
                self._cached_mono = now
            return self._cached


@dataclass(frozen=True, slots=True)
class _Rendered:
    """One job, as it was at the last scrape. The lists have a place for each metric."""

    job: LiveJob
    values: list[Any]
    lines: list[str]


class _JobSeries:
    """The lines of all metrics of jobs. Thread-safe. Compares jobs by identity: the store returns the same object for a
    row that has not changed."""

    def __init__(self, profile_of: ProfileOf) -> None:
        self._utilisation = _Utilisation(profile_of)
        self._lock = threading.Lock()
        self._rendered: dict[str, _Rendered] = {}

    def text(self, live: Sequence[LiveJob], *, openmetrics: bool) -> str:
        """The lines of all families, including those without a series."""
        with self._lock:
            kept = {}
            for job in live:
                known = self._rendered.get(job.job_id)
                kept[job.job_id] = known if known is not None and known.job is job else self._render(job, known)
            self._rendered = kept
            self._utilisation.forget_all_but(kept.keys())
        columns = (
            zip(*(metric_family.lines for metric_family in kept.values()), strict=True)
            if kept
            else ((),) * len(OF_JOBS)
        )
        by_metric = zip(OF_JOBS, columns, strict=True)
        return "".join(format_header(metric, openmetrics=openmetrics) + "".join(lines) for metric, lines in by_metric)

    def _render(self, job: LiveJob, before: _Rendered | None) -> _Rendered:
        values = [of_job(job) for of_job in _VALUES]
        values[_MFU] = self._utilisation.of_job(job)
        if before is None:
            lines = [_format_lines(metric, job.job_id, now) for metric, now in zip(OF_JOBS, values, strict=True)]
        else:
            compared = zip(OF_JOBS, values, before.values, before.lines, strict=True)
            lines = [
                text if now == old else _format_lines(metric, job.job_id, now) for metric, now, old, text in compared
            ]
        return _Rendered(job, values, lines)


def _format_lines(metric: Metric, job_id: str, values: Any) -> str:
    if values is None:
        return ""
    if isinstance(values, Mapping):
        return "".join(format_series(metric, (job_id, *labels), value) for labels, value in values.items())
    assert isinstance(values, float | int | Histogram)
    return format_series(metric, (job_id,), values)


class _Utilisation:
    """Measures the model FLOPs utilisation of jobs. One thread at a time.

    The planner counts the FLOPs of a token, and the profile of the node gives the peak; throughput and world size are
    those of the job's status. The FLOPs of each job's model are remembered.
    """

    def __init__(self, profile_of: ProfileOf) -> None:
        self._profile_of = profile_of
        self._known: dict[str, tuple[JobSpec, float, HardwareProfile] | None] = {}

    def of_job(self, job: LiveJob) -> float | None:
        """The utilisation of a job; None if the planner does not know the model, or nothing was measured yet."""
        status = job.status
        known = self._known.get(job.job_id)
        if job.job_id not in self._known or (known is not None and known[0] is not job.spec):
            known = self._known[job.job_id] = self._learn(job.spec)
        if known is None or not status.tokens_per_s or not status.workers:
            return None
        spec, flops_per_token, profile = known
        peak = profile.peak_flops[spec.precision] * status.workers / profile.sharing(status.workers)
        return flops_per_token * status.tokens_per_s / peak

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        self._known = {job_id: known for job_id, known in self._known.items() if job_id in job_ids}

    def _learn(self, spec: JobSpec) -> tuple[JobSpec, float, HardwareProfile] | None:
        shape = shape_of(spec)
        profile = self._profile_of(spec)
        if shape is None or not profile.peak_flops.get(spec.precision):
            return None
        return spec, shape.flops_per_token, profile


@dataclass(frozen=True)
class Scrape:
    """What the metrics of a scrape are made from."""

    snapshot: Snapshot
    sources: Sources
    now: float

    @property
    def tallies(self) -> DatabaseTallies:
        return self.sources.store.tallies

    @cached_property
    def view(self) -> ClusterView:
        return self.sources.cluster()

    @cached_property
    def space(self) -> os.statvfs_result:
        return os.statvfs(self.sources.state_dir)

    @property
    def leads(self) -> bool:
        lease = self.snapshot.lease
        return lease is not None and lease.owner == self.sources.owner and lease.expires_at > self.now

    @property
    def lags(self) -> dict[str, WebhookLag | None]:
        return {hook: self.snapshot.webhooks.get(hook) for hook in self.sources.webhooks.hooks}

    @cached_property
    def uses(self) -> list[tuple[str, WorkerUse]]:
        """The newest measurement of any worker on each node: all see the same filesystems."""
        use_by_node: dict[str, WorkerUse] = {}
        for job in self.snapshot.live:
            for worker in job.workers:
                use = worker.use
                if use is not None and (worker.node_id not in use_by_node or use_by_node[worker.node_id].at < use.at):
                    use_by_node[worker.node_id] = use
        return sorted(use_by_node.items())

    def counted(self, kind: type[StrEnum]) -> dict[Labels, Value]:
        """Count each member of `kind`, also those that never occurred."""
        return {(member.value,): self.tallies.counts.value(kind.__name__, member) for member in kind}


OF_SERVICE: tuple[tuple[Metric, Callable[[Scrape], Mapping[Labels, Value] | Value]], ...] = (
    (
        Metric("shoal_jobs", Kind.GAUGE, "Jobs in each state, including ended ones.", ("state",)),
        lambda s: {(state.value,): s.snapshot.jobs_by_state.get(state, 0) for state in JobState},
    ),
    (QUEUE_WAIT_SECONDS, lambda s: s.snapshot.queue_wait),
    (
        Metric(
            "shoal_queue_longest_wait_seconds",
            Kind.GAUGE,
            "Seconds that the longest waiting job of a project has been in the queue; 0: none waits.",
            ("project",),
        ),
        lambda s: {
            (project.name,): max(0.0, s.now - s.snapshot.queued_since.get(project.name, s.now))
            for project in s.snapshot.projects
        },
    ),
    (
        Metric(
            "shoal_scheduler_moves_total",
            Kind.COUNTER,
            "Changes of jobs' workers that the scheduler of this process has made, by kind; preempt: "
            "it took all of them.",
            ("kind",),
        ),
        lambda s: s.counted(MoveKind),
    ),
    (SCHEDULER_PASS_SECONDS, lambda s: s.sources.passes.passes.value()),
    (SCHEDULER_DECIDE_SECONDS, lambda s: s.sources.passes.decisions.value()),
    (
        Metric(
            "shoal_scheduler_failed_passes_total",
            Kind.COUNTER,
            "Passes of this process's control loop that failed: the lease was lost, Ray did not answer, or an error.",
        ),
        lambda s: s.sources.passes.failures.value(),
    ),
    (
        Metric(
            "shoal_project_workers",
            Kind.GAUGE,
            "Workers that are granted to the jobs of a project; default includes projects that are not defined.",
            ("project",),
        ),
        lambda s: {(project.name,): project.workers for project in s.snapshot.projects},
    ),
    (
        Metric(
            "shoal_project_share",
            Kind.GAUGE,
            "Share of all granted workers that the jobs of a project have.",
            ("project",),
        ),
        lambda s: {(project.name,): project.share for project in s.snapshot.projects},
    ),
    (
        Metric("shoal_project_queued_jobs", Kind.GAUGE, "Queued jobs of a project.", ("project",)),
        lambda s: {(project.name,): project.queued for project in s.snapshot.projects},
    ),
    (
        Metric(
            "shoal_incidents_total",
            Kind.COUNTER,
            "Incidents of all jobs that are over, by cause: while one is open, its cause may be corrected.",
            ("cause",),
        ),
        lambda s: {(cause.value,): s.snapshot.incidents_by_cause.get(cause, 0) for cause in IncidentCause},
    ),
    (
        Metric(
            "shoal_incidents_open", Kind.GAUGE, "Incidents of all jobs that are not over, by cause so far.", ("cause",)
        ),
        lambda s: {(cause.value,): s.snapshot.open_incidents.get(cause, 0) for cause in IncidentCause},
    ),
    (
        RECOVERY_SECONDS,
        lambda s: {
            (cause.value, phase.value): s.snapshot.recoveries.get((cause, phase), _make_empty(RECOVERY_SECONDS))
            for cause in IncidentCause
            for phase in RecoveryPhase
        },
    ),
    (INCIDENT_STEPS_LOST, lambda s: _by_cause(INCIDENT_STEPS_LOST, s.snapshot.steps_lost)),
    (INCIDENT_BYTES_MOVED, lambda s: _by_cause(INCIDENT_BYTES_MOVED, s.snapshot.bytes_moved)),
    (CHECKPOINT_SECONDS, lambda s: s.snapshot.checkpoints),
    (
        Metric(
            "shoal_cluster_connected",
            Kind.GAUGE,
            "1 while a cluster's gateway reports to the service and its Ray head answers the gateway, else 0.",
            ("cluster",),
        ),
        lambda s: {(cluster.name,): int(cluster.connected) for cluster in s.view.clusters},
    ),
    (
        Metric(
            "shoal_cluster_silent_seconds",
            Kind.GAUGE,
            "Seconds since the newest report of a cluster's gateway; absent: none has come.",
            ("cluster",),
        ),
        lambda s: {(cluster.name,): cluster.silent_s for cluster in s.view.clusters if cluster.silent_s is not None},
    ),
    (
        Metric(
            "shoal_cluster_nodes",
            Kind.GAUGE,
            "Nodes of a connected Ray cluster, each in one state.",
            ("cluster", "state"),
        ),
        lambda s: _nodes_by_state(s.view),
    ),
    (
        Metric(
            "shoal_cluster_resources",
            Kind.GAUGE,
            "CPUs and GPUs of all live nodes of a connected Ray cluster.",
            ("cluster", "resource"),
        ),
        lambda s: _by_resource(s.view, "total"),
    ),
    (
        Metric(
            "shoal_cluster_free_resources",
            Kind.GAUGE,
            "CPUs and GPUs of a connected Ray cluster that nothing has reserved.",
            ("cluster", "resource"),
        ),
        lambda s: _by_resource(s.view, "free"),
    ),
    (
        Metric(
            "shoal_node_shm_bytes",
            Kind.GAUGE,
            "Size of /dev/shm of a node on which a worker trains, in bytes.",
            ("node_id",),
        ),
        lambda s: {(node,): use.shm_bytes for node, use in s.uses if use.shm_bytes},
    ),
    (
        Metric(
            "shoal_node_shm_free_bytes",
            Kind.GAUGE,
            "Free bytes of /dev/shm of a node on which a worker trains.",
            ("node_id",),
        ),
        lambda s: {(node,): use.shm_free_bytes for node, use in s.uses if use.shm_bytes},
    ),
    (
        Metric(
            "shoal_node_disk_bytes",
            Kind.GAUGE,
            "Size of the filesystem to which a node's workers save checkpoints (of temporary files if "
            "it is none), in bytes.",
            ("node_id",),
        ),
        lambda s: {(node,): use.disk_bytes for node, use in s.uses if use.disk_bytes},
    ),
    (
        Metric("shoal_node_disk_free_bytes", Kind.GAUGE, "Free bytes of that filesystem.", ("node_id",)),
        lambda s: {(node,): use.disk_free_bytes for node, use in s.uses if use.disk_bytes},
    ),
    (
        Metric("shoal_lease_epoch", Kind.GAUGE, "Epoch of the lease on the jobs; rises with each new owner."),
        lambda s: s.snapshot.lease.epoch if s.snapshot.lease else 0,
    ),
    (
        Metric(
            "shoal_lease_expiry_timestamp_seconds",
            Kind.GAUGE,
            "When the lease on the jobs ends if it is not renewed, Unix time.",
        ),
        lambda s: s.snapshot.lease.expires_at if s.snapshot.lease else 0.0,
    ),
    (
        Metric(
            "shoal_control_plane_leader", Kind.GAUGE, "1 on the control plane that holds the lease, 0 on every other."
        ),
        lambda s: int(s.leads),
    ),
    (
        Metric(
            "shoal_state_filesystem_bytes",
            Kind.GAUGE,
            "Size of the filesystem of this control plane's state_dir, in bytes.",
        ),
        lambda s: s.space.f_blocks * s.space.f_frsize,
    ),
    (
        Metric("shoal_state_filesystem_free_bytes", Kind.GAUGE, "Free bytes of that filesystem."),
        lambda s: s.space.f_bavail * s.space.f_frsize,
    ),
    (
        Metric(
            "shoal_backup_timestamp_seconds",
            Kind.GAUGE,
            "When `shoal backup` last succeeded with this control plane's state_dir, Unix time; absent: never.",
        ),
        lambda s: {} if (at := newest_backup_at(s.sources.state_dir)) is None else at,
    ),
    (
        Metric(
            "shoal_reports_dropped_total",
            Kind.COUNTER,
            "Reports of supervisors that this process did not store, by reason.",
            ("reason",),
        ),
        lambda s: s.counted(DropReason),
    ),
    (
        Metric("shoal_events_total", Kind.COUNTER, "Events of jobs that this process has stored."),
        lambda s: s.tallies.events.value(),
    ),
    (DATABASE_SECONDS, lambda s: s.tallies.seconds.values()),
    (
        Metric(
            "shoal_database_errors_total", Kind.COUNTER, "Transactions that failed because the database did not answer."
        ),
        lambda s: s.tallies.errors.value(),
    ),
    (WAIT_SECONDS, lambda s: s.sources.waits.seconds.values()),
    (
        Metric(
            "shoal_wait_limit_seconds", Kind.GAUGE, "Seconds after which such a wait ends without an answer.", ("what",)
        ),
        lambda s: dict(sorted(s.sources.waits.limits.items())),
    ),
    (
        Metric(
            "shoal_waits_ended_total",
            Kind.COUNTER,
            "Waits of this process that have ended without an answer.",
            ("what",),
        ),
        lambda s: s.sources.waits.ended.values(),
    ),
    (
        Metric(
            "shoal_removed_total",
            Kind.COUNTER,
            "What this process has deleted on request or by retention: jobs, checkpoints, archives, and rows of logs, "
            "series and events of ended jobs.",
            ("kind",),
        ),
        lambda s: s.sources.removals.values(),
    ),
    (
        Metric(
            "shoal_webhook_deliveries_total",
            Kind.COUNTER,
            "Deliveries of events by this process, by hook (jobs: those of all specs) and outcome; gave_up: events "
            "whose attempts have ended, failed: attempts that are repeated.",
            ("hook", "outcome"),
        ),
        lambda s: s.sources.webhooks.outcomes.values(),
    ),
    (WEBHOOK_SECONDS, lambda s: s.sources.webhooks.seconds.values()),
    (
        Metric(
            "shoal_webhook_lag_seconds",
            Kind.GAUGE,
            "Age of the oldest event that a receiver has not accepted after a failed attempt; 0: there is none.",
            ("hook",),
        ),
        lambda s: {(hook,): max(0.0, s.now - lag.waiting_since) if lag else 0.0 for hook, lag in s.lags.items()},
    ),
    (
        Metric("shoal_webhook_failing_jobs", Kind.GAUGE, "Jobs whose events wait after a failed attempt.", ("hook",)),
        lambda s: {(hook,): lag.failing if lag else 0 for hook, lag in s.lags.items()},
    ),
    (
        Metric(
            "shoal_http_requests_total",
            Kind.COUNTER,
            "Finished requests by method, route template and class of status (2xx ...; none: no answer was begun).",
            ("method", "route", "status"),
        ),
        lambda s: s.sources.requests.finished.values(),
    ),
    (HTTP_REQUEST_SECONDS, lambda s: s.sources.requests.latencies.values()),
    (
        Metric(
            "shoal_http_refused_total",
            Kind.COUNTER,
            "Requests refused by this process with 429, or 413 for their size, by limit; failures: "
            "tokens that were not valid.",
            ("limit",),
        ),
        lambda s: s.sources.requests.refusals.values(),
    ),
    (
        Metric(
            "shoal_http_streams", Kind.GAUGE, "Streams that clients have open: server-sent events and followed logs."
        ),
        lambda s: s.sources.requests.streams.value(),
    ),
)
"""The metrics that are not of one job, each with its values. An absent value has no series. A cluster that is away
only shows how long it has been away."""
ALL: tuple[Metric, ...] = (*OF_JOBS, *(metric for metric, _ in OF_SERVICE))
"""All metrics in the order in which they are shown."""
_EXEMPLARS = {"shoal_incidents_total": (), "shoal_recovery_seconds": (RecoveryPhase.RECOVERY.value,)}
"""By metric: what follows the cause in the labels of the series that have an exemplar."""


def _find_exemplars(metric: Metric, tallies: DatabaseTallies) -> Exemplars:
    """The newest closed incident of each cause that this process has stored."""
    if metric.name not in _EXEMPLARS:
        return {}
    return {(cause.value, *_EXEMPLARS[metric.name]): exemplar for cause, exemplar in dict(tallies.exemplars).items()}


def _by_cause(metric: Metric, histograms: Mapping[IncidentCause, Histogram]) -> dict[Labels, Value]:
    return {(cause.value,): histograms.get(cause, _make_empty(metric)) for cause in IncidentCause}


def _make_empty(metric: Metric) -> Histogram:
    return Histogram((0,) * len(metric.buckets), 0, 0.0)


def _nodes_by_state(view: ClusterView) -> dict[Labels, Value]:
    counts = Counter((node.cluster, _find_state(node)) for node in view.nodes)
    connected = [cluster.name for cluster in view.clusters if cluster.connected]
    return {(name, state): counts[name, state] for name in connected for state in NODE_STATES}


def _by_resource(view: ClusterView, amount: str) -> dict[Labels, Value]:
    """CPUs and GPUs of the connected clusters; `amount`: total or free."""
    return {
        (cluster.name, resource): getattr(cluster, f"{resource}s_{amount}")
        for cluster in view.clusters
        if cluster.connected
        for resource in ("cpu", "gpu")
    }


def _find_state(node: NodeView) -> str:
    """The state of a node, one of NODE_STATES."""
    if not node.alive:
        return "dead"
    if node.drain is not None:
        return "draining" if node.num_workers else "drained"
    return "probation" if node.on_probation else "ready"
