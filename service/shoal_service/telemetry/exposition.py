"""Exposition: the answer of /metrics, made at the time of the scrape from one snapshot of the store and from memory.

    catalogue.py       declares each metric; that of a job says how its value is found in a `LiveJob`
    a metric of a job  `_JobSeries`: only the values that have changed since the last scrape become lines again
    any other metric   `_families`: its values, from the snapshot, the clusters and what this process has counted
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from shoal_service.collector import paused_collector
from shoal_service.fleet_views import ClusterView, NodeView
from shoal_service.planner import HardwareProfile
from shoal_service.planner.shape import shape_of
from shoal_service.store import Store, metrics_snapshot
from shoal_service.store.backup import newest_backup_at
from shoal_service.store.driving import MoveKind
from shoal_service.store.metrics_snapshot import Snapshot
from shoal_service.store.reporting import DropReason
from shoal_service.telemetry import catalogue as names
from shoal_service.telemetry.catalogue import JOB_MFU, OF_JOBS
from shoal_service.telemetry.metric import Exemplar, Histogram, Labels, LiveJob, Metric, RecoveryPhase, Value
from shoal_service.telemetry.tallies import PassTimes, RemovalTallies, RequestMetrics, WaitTallies, WebhookTallies
from shoal_service.telemetry.text_format import OPENMETRICS, Exemplars, family, header, media_type_of, series
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
    removals: RemovalTallies = field(default_factory=RemovalTallies)
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
        self._rendered: dict[tuple[str, bool], tuple[Mapping[Labels, Value], Exemplars, str]] = {}

    def render(self, accept: str, projects: Collection[str] | None = None) -> tuple[bytes, str]:
        """Returns the body and its media type: OpenMetrics if the scraper's `Accept` prefers that.

        Args:
            projects: only the metrics of these projects and of their jobs are shown; None means all metrics.

        Raises:
            StoreUnavailable
        """
        with paused_collector():
            return self._render(accept, projects)

    def _render(self, accept: str, projects: Collection[str] | None) -> tuple[bytes, str]:
        media_type = media_type_of(accept)
        openmetrics = media_type == OPENMETRICS
        snapshot = self._snapshot()
        if projects is not None:
            body = self._of_projects(snapshot, frozenset(projects), openmetrics=openmetrics)
            return (body + _END if openmetrics else body), media_type
        parts = [self._jobs.text(snapshot.live, openmetrics=openmetrics)]
        families = _families(snapshot, self._sources, self._clock())
        parts += [self._text(metric_family, openmetrics) for metric_family in families]
        encode: Callable[[CollectorRegistry], bytes] = generate_openmetrics if openmetrics else generate_latest
        of_process = encode(self._process)
        body = "".join(parts).encode() + of_process.removesuffix(_END)  # it ends the whole body, and no part of it
        return (body + _END if openmetrics else body), media_type

    def _of_projects(self, snapshot: Snapshot, projects: frozenset[str], *, openmetrics: bool) -> bytes:
        """Renders everything anew, because the lines that are kept are for users who see all projects."""
        live = [job for job in snapshot.live if job.spec.project in projects]
        parts = [_JobSeries(self._sources.profile_of).text(live, openmetrics=openmetrics)]
        for metric_family in _project_families(snapshot, self._clock()):
            rows = {labels: value for labels, value in metric_family.rows.items() if labels[0] in projects}
            parts.append(family(metric_family.metric, rows, openmetrics=openmetrics, exemplars={}))
        return "".join(parts).encode()

    def _text(self, metric_family: _Family, openmetrics: bool) -> str:
        """The lines of a family. They are kept, because most families do not change between two scrapes."""
        key = (metric_family.metric.name, openmetrics)
        known = self._rendered.get(key)
        if known is not None and known[0] == metric_family.rows and known[1] == metric_family.exemplars:
            return known[2]
        text = family(
            metric_family.metric, metric_family.rows, openmetrics=openmetrics, exemplars=metric_family.exemplars
        )
        self._rendered[key] = metric_family.rows, metric_family.exemplars, text
        return text

    def _snapshot(self) -> Snapshot:
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
        return "".join(header(metric, openmetrics=openmetrics) + "".join(lines) for metric, lines in by_metric)

    def _render(self, job: LiveJob, before: _Rendered | None) -> _Rendered:
        values = [of_job(job) for of_job in _VALUES]
        values[_MFU] = self._utilisation.of_job(job)
        if before is None:
            lines = [_lines(metric, job.job_id, now) for metric, now in zip(OF_JOBS, values, strict=True)]
        else:
            compared = zip(OF_JOBS, values, before.values, before.lines, strict=True)
            lines = [text if now == old else _lines(metric, job.job_id, now) for metric, now, old, text in compared]
        return _Rendered(job, values, lines)


def _lines(metric: Metric, job_id: str, values: Any) -> str:
    if values is None:
        return ""
    if isinstance(values, Mapping):
        return "".join(series(metric, (job_id, *labels), value) for labels, value in values.items())
    assert isinstance(values, float | int | Histogram)
    return series(metric, (job_id,), values)


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


@dataclass(frozen=True, slots=True)
class _Family:
    metric: Metric
    rows: Mapping[Labels, Value]
    exemplars: Exemplars = field(default_factory=dict)


def _families(snapshot: Snapshot, sources: Sources, now: float) -> Iterator[_Family]:
    """All families in the order of catalogue.py, apart from those without a value."""
    yield _Family(names.JOBS, {(s.value,): snapshot.jobs_by_state.get(s, 0) for s in JobState})
    yield from _scheduling(snapshot, sources, now)
    yield from _incidents(snapshot, sources.store.tallies.exemplars())
    yield _one(names.CHECKPOINT_SECONDS, snapshot.checkpoints)
    yield from _cluster(sources.cluster())
    yield from _nodes(snapshot)
    yield from _control_plane(snapshot, sources, now)
    yield from _webhooks(snapshot, sources.webhooks, now)
    requests = sources.requests
    yield _Family(names.HTTP_REQUESTS, requests.finished.values())
    yield _Family(names.HTTP_REQUEST_SECONDS, requests.latencies.values())
    yield _Family(names.HTTP_REFUSED, requests.refusals())
    yield _one(names.HTTP_STREAMS, requests.num_streams)


def _scheduling(snapshot: Snapshot, sources: Sources, now: float) -> Iterator[_Family]:
    passes, moves = sources.passes, sources.store.tallies.counted(MoveKind)
    yield _one(names.QUEUE_WAIT_SECONDS, snapshot.queue_wait)
    yield _Family(names.SCHEDULER_MOVES, {(kind.value,): moves.get(kind, 0) for kind in MoveKind})
    yield _one(names.SCHEDULER_PASS_SECONDS, passes.passes.value())
    yield _one(names.SCHEDULER_DECIDE_SECONDS, passes.decisions.value())
    yield _one(names.SCHEDULER_FAILED_PASSES, passes.failures.value())
    yield from _project_families(snapshot, now)


def _project_families(snapshot: Snapshot, now: float) -> Iterator[_Family]:
    """The families whose only label is `project`."""
    waits: dict[Labels, Value] = {
        (project.name,): max(0.0, now - snapshot.queued_since.get(project.name, now)) for project in snapshot.projects
    }
    yield _Family(names.QUEUE_LONGEST_SECONDS, waits)
    yield _Family(names.PROJECT_WORKERS, {(project.name,): project.workers for project in snapshot.projects})
    yield _Family(names.PROJECT_SHARE, {(project.name,): project.share for project in snapshot.projects})
    yield _Family(names.PROJECT_QUEUED_JOBS, {(project.name,): project.queued for project in snapshot.projects})


def _incidents(snapshot: Snapshot, exemplars: Mapping[IncidentCause, Exemplar]) -> Iterator[_Family]:
    """`exemplars`: the newest closed incident of each cause that this process has stored."""
    by_cause: dict[Labels, Exemplar] = {(cause.value,): exemplar for cause, exemplar in exemplars.items()}
    whole: dict[Labels, Exemplar] = {(c.value, RecoveryPhase.RECOVERY.value): e for c, e in exemplars.items()}
    over, still_open = snapshot.incidents_by_cause, snapshot.open_incidents
    yield _Family(names.INCIDENTS, {(c.value,): over.get(c, 0) for c in IncidentCause}, by_cause)
    yield _Family(names.OPEN_INCIDENTS, {(c.value,): still_open.get(c, 0) for c in IncidentCause})
    recoveries: dict[Labels, Value] = {
        (c.value, p.value): snapshot.recoveries.get((c, p), _nothing(names.RECOVERY_SECONDS))
        for c in IncidentCause
        for p in RecoveryPhase
    }
    yield _Family(names.RECOVERY_SECONDS, recoveries, whole)
    for metric, values in (
        (names.INCIDENT_STEPS_LOST, snapshot.steps_lost),
        (names.INCIDENT_BYTES_MOVED, snapshot.bytes_moved),
    ):
        yield _Family(metric, {(c.value,): values.get(c, _nothing(metric)) for c in IncidentCause})


def _cluster(view: ClusterView) -> Iterator[_Family]:
    """Metrics of the clusters. A cluster that is away only shows how long it has been away."""
    yield _Family(names.CLUSTER_CONNECTED, {(cluster.name,): int(cluster.connected) for cluster in view.clusters})
    silent = {cluster.name: cluster.silent_s for cluster in view.clusters if cluster.silent_s is not None}
    yield _Family(names.CLUSTER_SILENT, {(name,): silent_s for name, silent_s in silent.items()})
    connected = [cluster for cluster in view.clusters if cluster.connected]
    counts = Counter((node.cluster, _state_of(node)) for node in view.nodes)
    states: dict[Labels, Value] = {
        (cluster.name, state): counts[cluster.name, state] for cluster in connected for state in NODE_STATES
    }
    yield _Family(names.CLUSTER_NODES, states)
    total: dict[Labels, Value] = {}
    free: dict[Labels, Value] = {}
    for cluster in connected:
        total |= {(cluster.name, "cpu"): cluster.cpus_total, (cluster.name, "gpu"): cluster.gpus_total}
        free |= {(cluster.name, "cpu"): cluster.cpus_free, (cluster.name, "gpu"): cluster.gpus_free}
    yield _Family(names.CLUSTER_RESOURCES, total)
    yield _Family(names.CLUSTER_FREE_RESOURCES, free)


def _state_of(node: NodeView) -> str:
    """The state of a node, one of NODE_STATES."""
    if not node.alive:
        return "dead"
    if node.drain is not None:
        return "draining" if node.num_workers else "drained"
    return "probation" if node.on_probation else "ready"


def _nodes(snapshot: Snapshot) -> Iterator[_Family]:
    """Filesystems of the nodes, from the newest measurement of any worker on a node: all see the same filesystems."""
    use_by_node: dict[str, WorkerUse] = {}
    for job in snapshot.live:
        for worker in job.workers:
            use = worker.use
            if use is not None and (worker.node_id not in use_by_node or use_by_node[worker.node_id].at < use.at):
                use_by_node[worker.node_id] = use
    uses = sorted(use_by_node.items())
    yield _Family(names.NODE_SHM_BYTES, {(node,): use.shm_bytes for node, use in uses if use.shm_bytes})
    yield _Family(names.NODE_SHM_FREE_BYTES, {(node,): use.shm_free_bytes for node, use in uses if use.shm_bytes})
    yield _Family(names.NODE_DISK_BYTES, {(node,): use.disk_bytes for node, use in uses if use.disk_bytes})
    yield _Family(names.NODE_DISK_FREE_BYTES, {(node,): use.disk_free_bytes for node, use in uses if use.disk_bytes})


def _control_plane(snapshot: Snapshot, sources: Sources, now: float) -> Iterator[_Family]:
    lease, database, waits = snapshot.lease, sources.store.tallies, sources.waits
    leads = lease is not None and lease.owner == sources.owner and lease.expires_at > now
    yield _one(names.LEASE_EPOCH, lease.epoch if lease else 0)
    yield _one(names.LEASE_EXPIRY, lease.expires_at if lease else 0.0)
    yield _one(names.CONTROL_PLANE_LEADER, int(leads))
    space = os.statvfs(sources.state_dir)
    yield _one(names.STATE_BYTES, space.f_blocks * space.f_frsize)
    yield _one(names.STATE_FREE_BYTES, space.f_bavail * space.f_frsize)
    backed_up_at, dropped = newest_backup_at(sources.state_dir), database.counted(DropReason)
    yield _Family(names.BACKUP_AT, {} if backed_up_at is None else {(): backed_up_at})
    yield _Family(names.REPORTS_DROPPED, {(reason.value,): dropped.get(reason, 0) for reason in DropReason})
    yield _one(names.EVENTS, database.events.value())
    yield _Family(names.DATABASE_SECONDS, database.seconds.values())
    yield _one(names.DATABASE_ERRORS, database.errors.value())
    yield _Family(names.WAIT_SECONDS, waits.seconds.values())
    yield _Family(names.WAIT_LIMIT, waits.limits())
    yield _Family(names.WAITS_ENDED, waits.ended.values())
    yield _Family(names.REMOVED, sources.removals.counts.values())


def _webhooks(snapshot: Snapshot, tallies: WebhookTallies, now: float) -> Iterator[_Family]:
    hooks, lags = tallies.hooks, snapshot.webhooks
    yield _Family(names.WEBHOOK_DELIVERIES, tallies.outcomes.values())
    yield _Family(names.WEBHOOK_SECONDS, tallies.seconds.values())
    ages: dict[Labels, Value] = {
        (hook,): max(0.0, now - lags[hook].waiting_since) if hook in lags else 0.0 for hook in hooks
    }
    yield _Family(names.WEBHOOK_LAG_SECONDS, ages)
    yield _Family(names.WEBHOOK_FAILING, {(hook,): lags[hook].failing if hook in lags else 0 for hook in hooks})


def _one(metric: Metric, value: Value) -> _Family:
    return _Family(metric, {(): value})


def _nothing(metric: Metric) -> Histogram:
    return Histogram((0,) * len(metric.buckets), 0, 0.0)
