"""Store: every job with its histories. Thread-safe; synchronous; called by the HTTP edge, the control loop and the CLI.

Each method is one transaction. Any process may call the methods of users. The methods of the control loop take the
epoch of its lease, and raise LeaseLost once another owner holds the lease. After each commit that changed something,
the subscribers of this process are notified.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import text

from shoal_service.core.desired import Desired
from shoal_service.core.events.base import JobEvent
from shoal_service.core.events.service import NodeCleared
from shoal_service.core.nodes import Drain, DrainSource
from shoal_service.core.parity import DEFAULT_TOLERANCE
from shoal_service.core.selection import LabelSelector
from shoal_service.reports import SupervisorReports
from shoal_service.store import archives, driving, nodes, submissions
from shoal_service.store import lease as leases
from shoal_service.store import reports as report_items
from shoal_service.store.access.methods import AccessMethods
from shoal_service.store.checkpoints.methods import CheckpointMethods
from shoal_service.store.clusters.admin import ClusterAdminMethods
from shoal_service.store.clusters.methods import ClusterMethods
from shoal_service.store.database import Database, DatabaseTallies
from shoal_service.store.driving import DriveRow, MoveKind, RowCache, SpecCache
from shoal_service.store.hub import Hub, Listener, Subscription
from shoal_service.store.lease import LeaseMethods
from shoal_service.store.lifecycle.methods import LifecycleMethods
from shoal_service.store.migrate import migrate
from shoal_service.store.nodes import Suspicion
from shoal_service.store.overview.methods import OverviewMethods
from shoal_service.store.profiles.methods import ProfileMethods
from shoal_service.store.reads import comparison, history
from shoal_service.store.reads import metrics_snapshot as snapshots
from shoal_service.store.reads.live_jobs import LiveJobs
from shoal_service.store.reads.metrics_snapshot import Snapshot
from shoal_service.store.records import load_view
from shoal_service.store.reports import DropReason, exemplars_of
from shoal_service.store.retention.methods import RetentionMethods
from shoal_service.store.scheduling.methods import SchedulingMethods
from shoal_service.store.scheduling.node_methods import NodeMethods
from shoal_service.store.supervisors.methods import SupervisorMethods
from shoal_service.store.sweeps.methods import SweepMethods
from shoal_service.store.webhooks.methods import WebhookMethods
from shoal_service.telemetry.metric import Exemplar
from shoal_service.views import (
    CheckpointView,
    EventView,
    IncidentView,
    JobPatch,
    JobSummary,
    JobView,
    LogView,
    Page,
    ParityView,
    WorkerView,
)
from shoal_workers.contract.job import EndReason, IncidentCause, JobState
from shoal_workers.contract.spec import JobSpec


class Store(
    LeaseMethods,
    SchedulingMethods,
    NodeMethods,
    OverviewMethods,
    WebhookMethods,
    ProfileMethods,
    CheckpointMethods,
    RetentionMethods,
    AccessMethods,
    LifecycleMethods,
    SweepMethods,
    SupervisorMethods,
    ClusterMethods,
    ClusterAdminMethods,
):
    def __init__(self, database: Database) -> None:
        self._database = database
        self._hub = Hub()
        self._specs = SpecCache()
        self._rows = RowCache()
        self._dropped: Counter[DropReason] = Counter()
        self._moves: Counter[MoveKind] = Counter()
        self._live = LiveJobs(self._specs)
        self._exemplars: dict[IncidentCause, Exemplar] = {}
        self._counts_lock = threading.Lock()

    @classmethod
    def open(cls, url: str) -> Store:
        """Opens the database and migrates it. Raises StoreUnavailable."""
        database = Database(url)
        try:
            migrate(database)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        self._database.close()

    def ping(self) -> None:
        """Raises StoreUnavailable: the database does not answer."""
        with self._database.read() as tx:
            tx.execute(text("SELECT 1"))

    def subscribe(self, listener: Listener, job_id: str | None = None) -> Subscription:
        """See Hub.subscribe: `listener(job_id)` is called on the committing thread."""
        return self._hub.subscribe(listener, job_id)

    def snapshot(self, now: float) -> Snapshot:
        """The values of /metrics."""
        with self._database.read() as tx:
            return snapshots.read(tx, self._live, now=now)

    @property
    def tallies(self) -> DatabaseTallies:
        """What this process's transactions have taken and written."""
        return self._database.tallies

    # --- users

    def create_job(
        self, spec: JobSpec, *, idempotency_key: str | None, now: float, note: str = ""
    ) -> tuple[JobView, bool]:
        """Returns the job, and whether it is new. `note`: of its status. Raises IdempotencyConflict, QueueFull."""
        with self._database.write() as tx:
            view, created = submissions.create(tx, spec, idempotency_key=idempotency_key, now=now, note=note)
        if created:
            self._hub.publish(view.id, is_request=True)
        return view, created

    def get_job(self, job_id: str) -> JobView:
        """Raises JobNotFound."""
        with self._database.read() as tx:
            return load_view(tx, job_id)

    def list_jobs(
        self,
        *,
        states: Collection[JobState] = (),
        project: str | None = None,
        user: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        visible: Collection[str] | None = None,
        labels: Collection[LabelSelector] = (),
        search: str = "",
    ) -> Page[JobSummary]:
        """Newest first; no `states`: all of them; no `project`, no `user`: of all of them; `visible`: only jobs of
        these projects, None: of all; only jobs that all of `labels` match and that have every word of `search`.
        Raises InvalidCursor."""
        with self._database.read() as tx:
            which = submissions.Which(states, project, user, visible, labels, search)
            return submissions.page(tx, which, limit, cursor)

    def patch_job(self, job_id: str, patch: JobPatch, *, if_match: str | None, now: float) -> JobView:
        """Raises JobNotFound, PreconditionFailed, JobEnded, SpecError."""
        with self._database.write() as tx:
            view = submissions.patch(tx, job_id, patch, if_match=if_match, now=now)
        self._hub.publish(job_id, is_request=True)
        return view

    def request(self, job_id: str, desired: Desired, *, now: float) -> JobView:
        """Raises JobNotFound; RequestConflict (JobEnded): the request is impossible in the job's state."""
        with self._database.write() as tx:
            view, changed = submissions.request(tx, job_id, desired, now=now)
        if changed:
            self._hub.publish(job_id, is_request=True)
        return view

    def events(self, job_id: str, *, after: int = 0, limit: int = 500, tail: int | None = None) -> list[EventView]:
        with self._database.read() as tx:
            return history.read_events(tx, job_id, after=after, limit=limit, tail=tail)

    def event_numbers(self, job_ids: Collection[str]) -> dict[str, int]:
        """Number of the last event of each of these jobs that exist."""
        with self._database.read() as tx:
            return history.read_event_numbers(tx, job_ids)

    def logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        after: int | None = None,
        tail: int | None = None,
        limit: int = 1000,
    ) -> list[LogView]:
        with self._database.read() as tx:
            return history.read_logs(tx, job_id, rank=rank, after=after, tail=tail, limit=limit)

    def workers(self, job_id: str) -> list[WorkerView]:
        with self._database.read() as tx:
            return history.read_workers(tx, job_id)

    def workers_by_node(self) -> Counter[str]:
        """How many workers of all jobs are on each node, by node id."""
        with self._database.read() as tx:
            return history.read_workers_by_node(tx)

    def incidents(self, job_id: str) -> list[IncidentView]:
        with self._database.read() as tx:
            return history.read_incidents(tx, job_id)

    def checkpoints(self, job_id: str) -> list[CheckpointView]:
        with self._database.read() as tx:
            return history.read_checkpoints(tx, job_id)

    def parity(
        self, job_id: str, against_id: str, *, tolerance: float = DEFAULT_TOLERANCE, max_points: int = 0
    ) -> ParityView:
        """The losses of two jobs, step by step; `max_points` 0: no points. Raises JobNotFound."""
        with self._database.read() as tx:
            return comparison.parity(tx, job_id, against_id, tolerance=tolerance, max_points=max_points)

    def put_code(self, sha256: str, data: bytes, now: float) -> None:
        """Raises InvalidArchive: too large, or its SHA-256 is another one."""
        archives.check(sha256, data)
        with self._database.write() as tx:
            archives.put(tx, sha256, data, now=now)

    def has_code(self, sha256: str) -> bool:
        with self._database.read() as tx:
            return archives.exists(tx, sha256)

    def get_code(self, sha256: str) -> bytes | None:
        with self._database.read() as tx:
            return archives.get(tx, sha256)

    def drain_node(
        self,
        node_id: str,
        *,
        reason: str,
        deadline: float | None,
        now: float,
        source: DrainSource = DrainSource.API,
    ) -> None:
        """Requests that jobs leave the node. Idempotent; the caller checks that the node exists."""
        with self._database.write() as tx:
            nodes.request_drain(tx, node_id, reason=reason, deadline=deadline, now=now, source=source)
        self._hub.publish(f"node {node_id}", is_request=True)

    def undo_drain(self, node_id: str) -> bool:
        """The node may be used again; False: it was not drained."""
        with self._database.write() as tx:
            undone = nodes.undo_drain(tx, node_id)
        if undone:
            self._hub.publish(f"node {node_id}", is_request=True)
        return undone

    def drains(self) -> dict[str, Drain]:
        """By node id: the drains of users and of notices. The store does not know those that Ray announces."""
        with self._database.read() as tx:
            return nodes.drains(tx)

    def suspicions(self) -> dict[str, Suspicion]:
        """Nodes on probation, by id."""
        with self._database.read() as tx:
            return nodes.suspicions(tx)

    # --- control loop

    def jobs_to_drive(self, *, max_queued: int = 1000, unreadable: dict[str, str] | None = None) -> list[DriveRow]:
        """Every job with an attempt, then the first jobs of the queue. Jobs whose stored spec cannot be read are left
        out and added to `unreadable`: why, by id."""
        with self._database.read() as tx:
            return driving.to_drive(tx, self._specs, self._rows, max_queued=max_queued, unreadable=unreadable)

    def quarantine(self, unreadable: Mapping[str, str], *, epoch: int, now: float) -> None:
        """Notes why these jobs are not driven, with one event each."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            changed = driving.quarantine(tx, unreadable, now=now)
        for job_id in changed:
            self._hub.publish(job_id)

    def begin_attempt(
        self, job_id: str, *, workers: int, cluster: str = "", reason: str = "", epoch: int, now: float
    ) -> int:
        """QUEUED -> STARTING in this cluster, for the scheduler's `reason`. Returns the number of the attempt.

        Raises RequestConflict: the job has left the queue."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            attempt = driving.begin_attempt(tx, job_id, workers=workers, cluster=cluster, reason=reason, now=now)
        self._count(MoveKind.START)
        self._hub.publish(job_id)
        return attempt

    def set_grant(self, job_id: str, *, workers: int, reason: str, epoch: int, now: float) -> None:
        """Grants a job with an attempt a number of workers, with an event if the number changes."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            move = driving.set_grant(tx, job_id, workers=workers, reason=reason, now=now)
        if move is not None:
            self._count(move)
            self._hub.publish(job_id)

    def preempt(self, job_id: str, *, reason: str, beneficiary: str, epoch: int, now: float) -> None:
        """Takes all workers of a job with an attempt, with an event: the attempt saves and ends, and the job returns to
        the queue. `beneficiary`: the job that gets the workers."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            changed = driving.preempt(tx, job_id, reason=reason, beneficiary=beneficiary, now=now)
        if changed:
            self._count(MoveKind.PREEMPT)
            self._hub.publish(job_id)

    def apply(self, job_id: str, reports: SupervisorReports, *, epoch: int, now: float) -> None:
        """Stores each item of reports that the control plane makes in the place of a supervisor exactly once; drops and
        counts what is stale or impossible."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            outcome = report_items.apply(tx, job_id, reports, now=now)
        self._note_stored(job_id, reports, outcome.dropped, changed=outcome.changed)

    def _note_stored(
        self, job_id: str, reports: SupervisorReports, dropped: Sequence[DropReason], *, changed: bool
    ) -> None:
        with self._counts_lock:
            self._dropped.update(dropped)
            if not dropped:
                self._exemplars.update(exemplars_of(job_id, reports))
        if changed or reports.stacks is not None:
            self._hub.publish(job_id, is_request=reports.end is not None or reports.stacks is not None)

    def requeue(self, job_id: str, *, reason: EndReason, message: str, epoch: int, now: float) -> None:
        """The attempt is lost: the job returns to the queue, or is paused or cancelled if a user has requested that."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            changed = driving.requeue(tx, job_id, reason=reason, message=message, now=now)
        if changed:
            self._hub.publish(job_id, is_request=True)

    def note_stay(self, job_id: str, *, cluster: str, reason: str, epoch: int, now: float) -> None:
        """Why the job's attempt stays in a cluster that it should leave, in its status and its history; or why a queued
        job does not start in the one that it names."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            changed = driving.note_stay(tx, job_id, cluster=cluster, reason=reason, now=now)
        if changed:
            self._hub.publish(job_id)

    def record_event(self, job_id: str, event: JobEvent, *, epoch: int, now: float) -> None:
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            driving.record_event(tx, job_id, event, now=now)
        self._hub.publish(job_id)

    def postpone_probation(self, node_id: str, *, reason: str, next_test_at: float, epoch: int) -> None:
        """The node has failed a test."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            nodes.postpone_test(tx, node_id, reason=reason, next_test_at=next_test_at)

    def repeat_node_test(self, suspicion: Suspicion, *, next_test_at: float, epoch: int) -> None:
        """The node has passed a test, and is tested again later."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            nodes.repeat_test(tx, suspicion, next_test_at=next_test_at)

    def clear_suspicion(self, suspicion: Suspicion, *, epoch: int, now: float) -> bool:
        """The node has passed its test; the job that suspected it gets an event. False: the node was suspected again
        since the test began."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            if not nodes.clear_suspicion(tx, suspicion):
                return False
            driving.record_event(
                tx,
                suspicion.job_id,
                NodeCleared(node_id=suspicion.node_id, suspected_s=now - suspicion.since, reason=suspicion.reason),
                now=now,
            )
        self._hub.publish(suspicion.job_id)
        return True

    def forget_nodes(self, node_ids: frozenset[str], *, epoch: int) -> None:
        """Deletes drains, cordons and suspicions of nodes that have left the cluster."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            nodes.forget(tx, node_ids)

    def dropped(self) -> dict[DropReason, int]:
        """Counts of what `apply` has dropped since this process started."""
        with self._counts_lock:
            return dict(self._dropped)

    def exemplars(self) -> dict[IncidentCause, Exemplar]:
        """The newest closed incident of each cause that this process has stored."""
        with self._counts_lock:
            return dict(self._exemplars)

    def moves(self) -> dict[MoveKind, int]:
        """Counts of the changes that the scheduler has made since this process started."""
        with self._counts_lock:
            return dict(self._moves)

    def _count(self, move: MoveKind) -> None:
        with self._counts_lock:
            self._moves[move] += 1
