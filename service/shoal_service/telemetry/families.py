"""Makes the families of metrics that are not of one job, from what is known at the time of the scrape. Pure.

A closed set of label values is shown in full from the start: `increase()` sees the first incident of a cause only if
its counter was 0 before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shoal_service.fleet_views import ClusterView, NodeView
from shoal_service.store.database import DatabaseTallies
from shoal_service.store.driving import MoveKind
from shoal_service.store.metrics_snapshot import Snapshot
from shoal_service.store.reporting import DropReason
from shoal_service.telemetry import catalogue as names
from shoal_service.telemetry.metric import Exemplar, Histogram, Labels, Metric, RecoveryPhase, Value
from shoal_service.telemetry.tallies import PassTimes, RemovalTallies, RequestMetrics, WebhookTallies
from shoal_service.telemetry.text_format import Exemplars
from shoal_workers.contract.job import IncidentCause, JobState
from shoal_workers.contract.messages import WorkerUse

NODE_STATES = ("ready", "draining", "drained", "probation", "dead")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is known at the time of a scrape."""

    snapshot: Snapshot
    owner: str
    now: float
    dropped: Mapping[DropReason, int]
    moves: Mapping[MoveKind, int]
    exemplars: Mapping[IncidentCause, Exemplar]
    """The newest closed incident of each cause that this process has stored."""
    transactions: DatabaseTallies
    requests: RequestMetrics
    passes: PassTimes
    cluster: ClusterView
    webhooks: WebhookTallies
    removals: RemovalTallies
    state_filesystem: tuple[int, int]
    """Bytes and free bytes."""
    backed_up_at: float | None


@dataclass(frozen=True, slots=True)
class Family:
    metric: Metric
    rows: Mapping[Labels, Value]
    exemplars: Exemplars = field(default_factory=dict)


def families(scene: Scene) -> Iterator[Family]:
    """All families in the order of catalogue.py, apart from those without a value."""
    snapshot = scene.snapshot
    yield Family(names.JOBS, {(s.value,): snapshot.jobs_by_state.get(s, 0) for s in JobState})
    yield from _scheduling(scene)
    yield from _incidents(scene)
    yield _one(names.CHECKPOINT_SECONDS, snapshot.checkpoints)
    yield from _cluster(scene.cluster)
    yield from _nodes(snapshot)
    yield from _control_plane(scene)
    yield from _webhooks(scene)
    requests = scene.requests
    yield Family(names.HTTP_REQUESTS, requests.requests())
    yield Family(names.HTTP_REQUEST_SECONDS, requests.latencies())
    yield Family(names.HTTP_REFUSED, requests.refusals())
    yield _one(names.HTTP_STREAMS, requests.num_streams)


def _scheduling(scene: Scene) -> Iterator[Family]:
    snapshot, passes = scene.snapshot, scene.passes
    yield _one(names.QUEUE_WAIT_SECONDS, snapshot.queue_wait)
    yield Family(names.SCHEDULER_MOVES, {(kind.value,): scene.moves.get(kind, 0) for kind in MoveKind})
    yield _one(names.SCHEDULER_PASS_SECONDS, passes.passes.value())
    yield _one(names.SCHEDULER_DECIDE_SECONDS, passes.decisions.value())
    yield _one(names.SCHEDULER_FAILED_PASSES, passes.failures.value())
    yield from project_families(snapshot, scene.now)


def project_families(snapshot: Snapshot, now: float) -> Iterator[Family]:
    """The families whose only label is `project`."""
    waits: dict[Labels, Value] = {
        (one.name,): max(0.0, now - snapshot.queued_since.get(one.name, now)) for one in snapshot.projects
    }
    yield Family(names.QUEUE_LONGEST_SECONDS, waits)
    yield Family(names.PROJECT_WORKERS, {(one.name,): one.workers for one in snapshot.projects})
    yield Family(names.PROJECT_SHARE, {(one.name,): one.share for one in snapshot.projects})
    yield Family(names.PROJECT_QUEUED_JOBS, {(one.name,): one.queued for one in snapshot.projects})


def _incidents(scene: Scene) -> Iterator[Family]:
    snapshot = scene.snapshot
    by_cause: dict[Labels, Exemplar] = {(cause.value,): exemplar for cause, exemplar in scene.exemplars.items()}
    whole: dict[Labels, Exemplar] = {(c.value, RecoveryPhase.RECOVERY.value): e for c, e in scene.exemplars.items()}
    over, still_open = snapshot.incidents_by_cause, snapshot.open_incidents
    yield Family(names.INCIDENTS, {(c.value,): over.get(c, 0) for c in IncidentCause}, by_cause)
    yield Family(names.OPEN_INCIDENTS, {(c.value,): still_open.get(c, 0) for c in IncidentCause})
    recoveries: dict[Labels, Value] = {
        (c.value, p.value): snapshot.recoveries.get((c, p), _nothing(names.RECOVERY_SECONDS))
        for c in IncidentCause
        for p in RecoveryPhase
    }
    yield Family(names.RECOVERY_SECONDS, recoveries, whole)
    for metric, found in (
        (names.INCIDENT_STEPS_LOST, snapshot.steps_lost),
        (names.INCIDENT_BYTES_MOVED, snapshot.bytes_moved),
    ):
        yield Family(metric, {(c.value,): found.get(c, _nothing(metric)) for c in IncidentCause})


def _cluster(view: ClusterView) -> Iterator[Family]:
    """Metrics of the clusters. A cluster that is away only shows how long it has been away."""
    yield Family(names.CLUSTER_CONNECTED, {(one.name,): int(one.connected) for one in view.clusters})
    silent = {one.name: one.silent_s for one in view.clusters if one.silent_s is not None}
    yield Family(names.CLUSTER_SILENT, {(name,): silent_s for name, silent_s in silent.items()})
    connected = [one for one in view.clusters if one.connected]
    counts = Counter((node.cluster, _state_of(node)) for node in view.nodes)
    states: dict[Labels, Value] = {
        (one.name, state): counts[one.name, state] for one in connected for state in NODE_STATES
    }
    yield Family(names.CLUSTER_NODES, states)
    total: dict[Labels, Value] = {}
    free: dict[Labels, Value] = {}
    for one in connected:
        total |= {(one.name, "cpu"): one.cpus_total, (one.name, "gpu"): one.gpus_total}
        free |= {(one.name, "cpu"): one.cpus_free, (one.name, "gpu"): one.gpus_free}
    yield Family(names.CLUSTER_RESOURCES, total)
    yield Family(names.CLUSTER_FREE_RESOURCES, free)


def _state_of(node: NodeView) -> str:
    """The state of a node, one of NODE_STATES."""
    if not node.alive:
        return "dead"
    if node.drain is not None:
        return "draining" if node.num_workers else "drained"
    return "probation" if node.on_probation else "ready"


def _nodes(snapshot: Snapshot) -> Iterator[Family]:
    """Filesystems of the nodes, from the newest measurement of any worker on a node: all see the same filesystems."""
    found: dict[str, WorkerUse] = {}
    for job in snapshot.live:
        for worker in job.workers:
            use = worker.use
            if use is not None and (worker.node_id not in found or found[worker.node_id].at < use.at):
                found[worker.node_id] = use
    uses = sorted(found.items())
    yield Family(names.NODE_SHM_BYTES, {(node,): use.shm_bytes for node, use in uses if use.shm_bytes})
    yield Family(names.NODE_SHM_FREE_BYTES, {(node,): use.shm_free_bytes for node, use in uses if use.shm_bytes})
    yield Family(names.NODE_DISK_BYTES, {(node,): use.disk_bytes for node, use in uses if use.disk_bytes})
    yield Family(names.NODE_DISK_FREE_BYTES, {(node,): use.disk_free_bytes for node, use in uses if use.disk_bytes})


def _control_plane(scene: Scene) -> Iterator[Family]:
    lease = scene.snapshot.lease
    leads = lease is not None and lease.owner == scene.owner and lease.expires_at > scene.now
    yield _one(names.LEASE_EPOCH, lease.epoch if lease else 0)
    yield _one(names.LEASE_EXPIRY, lease.expires_at if lease else 0.0)
    yield _one(names.CONTROL_PLANE_LEADER, int(leads))
    size, free = scene.state_filesystem
    yield _one(names.STATE_BYTES, size)
    yield _one(names.STATE_FREE_BYTES, free)
    yield Family(names.BACKUP_AT, {} if scene.backed_up_at is None else {(): scene.backed_up_at})
    yield Family(names.REPORTS_DROPPED, {(reason.value,): scene.dropped.get(reason, 0) for reason in DropReason})
    yield _one(names.EVENTS, scene.transactions.events.value())
    yield Family(names.DATABASE_SECONDS, scene.transactions.seconds.values())
    yield _one(names.DATABASE_ERRORS, scene.transactions.errors.value())
    yield Family(names.REMOVED, scene.removals.counts.values())


def _webhooks(scene: Scene) -> Iterator[Family]:
    hooks, lags = scene.webhooks.hooks, scene.snapshot.webhooks
    yield Family(names.WEBHOOK_DELIVERIES, scene.webhooks.outcomes.values())
    yield Family(names.WEBHOOK_SECONDS, scene.webhooks.seconds.values())
    ages: dict[Labels, Value] = {
        (hook,): max(0.0, scene.now - lags[hook].waiting_since) if hook in lags else 0.0 for hook in hooks
    }
    yield Family(names.WEBHOOK_LAG_SECONDS, ages)
    yield Family(names.WEBHOOK_FAILING, {(hook,): lags[hook].failing if hook in lags else 0 for hook in hooks})


def _one(metric: Metric, value: Value) -> Family:
    return Family(metric, {(): value})


def _nothing(metric: Metric) -> Histogram:
    return Histogram((0,) * len(metric.buckets), 0, 0.0)
