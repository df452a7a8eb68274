"""ClusterReader: the nodes of all clusters, with drains, cordons, probation and what others have reserved on them.

    newest report of each gateway  ->  one snapshot a second and cluster; one is asked for when a node has come or gone,
                                       or an attempt there has begun or ended
    drains, cordons, suspicions, labels of clusters  ->  read from the store each time

Called by the control loop in each pass. Of several clusters, one that answers late is left out, and its last snapshot
counts for some seconds: the pass is about all of them. It never decides which job uses which node.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shoal_service.clock import Clock
from shoal_service.cluster.errors import ClusterError, ClusterUnreachable
from shoal_service.clusters.wire import AttemptKey, ClusterSnapshot, Reservation
from shoal_service.control.protocols import Cluster, Clusters, JoinedAs
from shoal_service.core import nodes as node_rules
from shoal_service.core.nodes import Cordon, Node, NodeSuspicion
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.fleet_views import ClusterSummary, ClusterView, NodeView
from shoal_service.store import Lease, Store, node_records

_log = logging.getLogger(__name__)
READ_S = 1.0
"""Seconds after which a cluster is read again."""
_SNAPSHOT_S = 5.0
_LATE_S = 0.3
"""Seconds that a pass waits for one cluster, if there are several."""
_NOTHING = WorkerNeed()


class ClusterReader:
    """Reads the nodes of all clusters. `view` may be read from any thread; `read` is called by one pass at a time."""

    def __init__(self, store: Store, clusters: Clusters, clock: Clock, max_probation: str) -> None:
        self._store = store
        self._clusters = clusters
        self._clock = clock
        self._max_probation = max_probation
        self._readings: dict[str, _Reading] = {}
        self.foreign: dict[str, WorkerNeed] = {}
        """Resources that others than Shoal's jobs have reserved, by node id."""
        self.workers: dict[str, dict[str, int]] = {}
        """Number of workers that are alive, by job id and node id, in the cluster of the job's attempt."""
        self.reservations: tuple[Reservation, ...] = ()
        """Reservations of the workers of all jobs."""
        self.view = ClusterView(
            connected=False,
            address=clusters.of("").address,
            nodes=(),
            cpus_total=0,
            cpus_free=0,
            gpus_total=0,
            gpus_free=0,
            owner="",
            epoch=0,
        )

    def expire(self, cluster: str) -> None:
        """Notes that a node or an attempt has changed in the cluster. The next `read` has the cluster looked at."""
        if (reading := self._readings.get(cluster or self._clusters.own)) is not None:
            reading.is_expired = True

    def nodes_of(self, cluster: str) -> tuple[NodeView, ...]:
        """The nodes of one cluster as it has reported them last, also if it is away."""
        reading = self._readings.get(cluster or self._clusters.own)
        return () if reading is None else reading.nodes

    @property
    def connected_nodes(self) -> tuple[NodeView, ...]:
        """The nodes of the clusters that answer."""
        return tuple(node for reading in self._readings.values() if not reading.why_away for node in reading.nodes)

    @property
    def connected(self) -> tuple[str, ...]:
        """Names of the clusters that answer."""
        return tuple(name for name, reading in self._readings.items() if not reading.why_away)

    def why_away(self, cluster: str) -> str:
        """Why a cluster does not count as connected; empty if it does."""
        name = cluster or self._clusters.own
        reading = self._readings.get(name)
        return f"no cluster has joined under the name {name!r}" if reading is None else reading.why_away

    def attempts(self, cluster: str) -> frozenset[AttemptKey]:
        """Attempts that have actors in the cluster."""
        snapshot = self._readings[cluster].snapshot
        return frozenset() if snapshot is None else snapshot.attempts

    async def read(self, lease: Lease | None, clusters_of_jobs: Mapping[str, str]) -> bool:
        """Reads all clusters. False: no cluster answers, and the last view is kept, marked as not connected.

        Args:
            clusters_of_jobs: of the jobs with an attempt, by job id.
        """
        await asyncio.to_thread(self._clusters.refresh)
        joined = self._clusters.joined
        self._readings = {name: self._readings.get(name) or _Reading(name, self._clock) for name in joined}
        await self._look(joined)
        by_cluster: dict[str, set[str]] = {name: set() for name in joined}
        for job_id, name in clusters_of_jobs.items():
            by_cluster.get(name, set()).add(job_id)
        for name, reading in self._readings.items():
            reading.observe(by_cluster[name])
        self.foreign = {
            id_: need for cluster_reading in self._readings.values() for id_, need in cluster_reading.foreign.items()
        }
        seen = [
            (name, cluster_reading.seen)
            for name, cluster_reading in self._readings.items()
            if cluster_reading.seen is not None
        ]
        self.reservations = tuple(reservation for _, snapshot in seen for reservation in snapshot.reservations)
        self.workers = _by_job(seen, clusters_of_jobs)
        is_connected = bool(self.connected)
        if is_connected:
            await asyncio.to_thread(self._describe, joined, lease)
        lease = lease or (await asyncio.to_thread(self._store.current_lease) if is_connected else None)
        self._show(joined, lease, Counter(clusters_of_jobs.values()))
        return is_connected

    async def _look(self, joined: Mapping[str, JoinedAs]) -> None:
        due = [reading for reading in self._readings.values() if reading.is_due()]
        waits = [task for poller in due if (task := poller.begin(joined[poller.name].cluster)) is not None]
        if waits:
            limit_s = _SNAPSHOT_S if len(joined) == 1 else _LATE_S
            with suppress(TimeoutError):
                await self._clock.wait_for(asyncio.wait(waits), limit_s)
        for poller in due:
            poller.take()

    def _describe(self, joined: Mapping[str, JoinedAs], lease: Lease | None) -> None:
        """The nodes with their drains, cordons and probation; blocks on the store."""
        store = self._store
        with store.read() as tx:
            drains, suspicions = node_records.drains(tx), node_records.suspicions(tx)
            cordons = node_records.cordons(tx)
        suspected = {
            s.node_id: NodeSuspicion(s.reason, s.since, s.next_test_at, s.job_ids, s.num_tests)
            for s in suspicions.values()
        }
        nodes_by_cluster: dict[str, tuple[Node, ...]] = {}
        gone: set[str] = set()
        for name, cluster_reading in self._readings.items():
            if cluster_reading.why_away or cluster_reading.snapshot is None:
                nodes_by_cluster[name] = cluster_reading.nodes
                continue
            gone |= {n.node_id for n in cluster_reading.snapshot.nodes if not n.alive} & {
                *drains,
                *suspicions,
                *cordons,
            }
            nodes_by_cluster[name] = _of_cluster(cluster_reading.snapshot.nodes, name, joined[name], cordons)
        if gone and lease is not None:  # Ray never reuses the id of a dead node, so its rows are of no use
            with store.write(lease.epoch) as tx:
                node_records.forget(tx, frozenset(gone))
        for name, nodes in nodes_by_cluster.items():
            reading = self._readings[name]
            if reading.why_away:
                continue
            shown = node_rules.described(nodes, drains, suspected, self._max_probation)
            reading.nodes = tuple(_view_of(node, reading.foreign) for node in shown)

    def _show(self, joined: Mapping[str, JoinedAs], lease: Lease | None, num_jobs: Mapping[str, int]) -> None:
        summaries = tuple(
            reading.summary(joined[name], num_jobs.get(name, 0)) for name, reading in self._readings.items()
        )
        connected = [summary for summary in summaries if summary.connected]
        if not connected:
            self.view = self.view.model_copy(update={"connected": False, "clusters": summaries})
            return
        self.view = ClusterView(
            connected=True,
            address=self._clusters.of("").address,
            clusters=summaries,
            nodes=tuple(node for reading in self._readings.values() for node in reading.nodes),
            cpus_total=sum(cluster.cpus_total for cluster in connected),
            cpus_free=sum(cluster.cpus_free for cluster in connected),
            gpus_total=sum(cluster.gpus_total for cluster in connected),
            gpus_free=sum(cluster.gpus_free for cluster in connected),
            owner=lease.owner if lease else "",
            epoch=lease.epoch if lease else 0,
        )


class _Reading:
    """What this process knows of one cluster, and the call that asks for more."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._foreign_use = ForeignUse()
        self._task: asyncio.Task[ClusterSnapshot] | None = None
        self._began_mono = self._read_mono = 0.0
        self._is_new = False
        """True if the newest snapshot is still to be observed."""
        self.snapshot: ClusterSnapshot | None = None
        """The snapshot that counts; None if the cluster is away."""
        self.seen: ClusterSnapshot | None = None
        """The newest snapshot, also if the cluster is away now."""
        self.why_away = "its gateway has not reported yet"
        self.is_expired = False
        """True if something has changed since the gateway has reported."""
        self.nodes: tuple[NodeView, ...] = ()
        self.foreign: dict[str, WorkerNeed] = {}

    def is_due(self) -> bool:
        age_s = self._clock.monotonic() - self._read_mono
        return self.snapshot is None or self.is_expired or age_s >= READ_S

    def begin(self, cluster: Cluster) -> asyncio.Task[ClusterSnapshot] | None:
        """Begins a call, one at a time. A call that hangs is asked about again in the next pass. None if it hangs, so
        nothing waits for it."""
        mono = self._clock.monotonic()
        if self._task is None:
            self._task = asyncio.create_task(_snapshot(cluster, fresh=self.is_expired))
            self._task.add_done_callback(_retrieve)
            self._began_mono, self.is_expired = mono, False
        elif not self._task.done() and mono - self._began_mono >= _SNAPSHOT_S:
            return None
        return self._task

    def take(self) -> None:
        """Takes the result of the call. Raises what is no error of the cluster."""
        mono, task = self._clock.monotonic(), self._task
        assert task is not None
        if not task.done():
            if self.snapshot is None or mono - self._read_mono >= _SNAPSHOT_S:
                self._go_away(f"no answer from the Ray head within {_SNAPSHOT_S:g} s")
            return
        self._task = None
        try:
            self.snapshot = self.seen = task.result()
        except ClusterError as error:
            self._go_away(str(error))
            return
        self.why_away, self._read_mono, self._is_new = "", mono, True

    def observe(self, job_ids: set[str]) -> None:
        """Observes the newest snapshot. `job_ids`: of the jobs with an attempt there."""
        if self._is_new and self.snapshot is not None:
            self.foreign = self._foreign_use.observe(self.snapshot, job_ids, self._read_mono)
            self._is_new = False

    def summary(self, joined: JoinedAs, num_jobs: int) -> ClusterSummary:
        alive = [node for node in self.nodes if node.alive]
        free = [] if self.snapshot is None else [*self.snapshot.free.values()]
        return ClusterSummary(
            name=self.name,
            address=joined.cluster.address,
            connected=not self.why_away,
            why_away=self.why_away,
            silent_s=joined.cluster.silent_s,
            labels=dict(joined.labels),
            cordon=joined.cordon,
            num_nodes=len(alive),
            cpus_total=sum(node.cpus for node in alive),
            cpus_free=sum(node.cpus for node in free),
            gpus_total=sum(node.gpus for node in alive),
            gpus_free=sum(node.gpus for node in free),
            num_jobs=num_jobs,
        )

    def _go_away(self, why: str) -> None:
        if self.snapshot is not None:
            _log.warning("ray_head.away", extra={"cluster": self.name, "error": why})
        self.snapshot, self.why_away = None, why


def _of_cluster(nodes: Sequence[Node], name: str, joined: JoinedAs, cordons: Mapping[str, Cordon]) -> tuple[Node, ...]:
    """Adds what belongs to the cluster to the nodes of its snapshot: its name, its labels (those of the node itself
    take precedence), and its cordon."""
    of_all = node_rules.cordon_of_cluster(name, joined.cordon)
    return tuple(
        node.model_copy(
            update={
                "cluster": name,
                "cordon": cordons.get(node.node_id, of_all),
                "labels": {**joined.labels, **node.labels} if joined.labels else node.labels,
            }
        )
        for node in nodes
    )


def _view_of(node: Node, foreign: Mapping[str, WorkerNeed]) -> NodeView:
    others = foreign.get(node.node_id, _NOTHING)
    return NodeView.of(node, cpus_of_others=others.cpus, gpus_of_others=others.gpus)


async def _snapshot(cluster: Cluster, *, fresh: bool) -> ClusterSnapshot:
    """`fresh`: not older than this call, if that is possible within a second."""
    if fresh and cluster.connected:
        with suppress(ClusterUnreachable):  # then what was reported last counts
            await cluster.look_now()
    return await asyncio.to_thread(cluster.snapshot)


def _retrieve(task: asyncio.Task[ClusterSnapshot]) -> None:
    """Retrieves the error of a call that is no longer waited for, so that asyncio does not report it as a lost one."""
    if not task.cancelled():
        task.exception()


def _by_job(
    seen: Sequence[tuple[str, ClusterSnapshot]], clusters_of_jobs: Mapping[str, str]
) -> dict[str, dict[str, int]]:
    """Groups by job, without what is left of an earlier attempt in another cluster."""
    use_by_job: dict[str, dict[str, int]] = {}
    for name, snapshot in seen:
        for reservation in snapshot.reservations:
            if reservation.is_alive and clusters_of_jobs.get(reservation.job_id, name) == name:
                on_nodes = use_by_job.setdefault(reservation.job_id, {})
                on_nodes[reservation.node_id] = on_nodes.get(reservation.node_id, 0) + 1
    return use_by_job


_SETTLED_S = 4.0
"""Seconds within which a killed worker returns its resources, and a new one is seen to have them."""
_CREATING_S = 120.0
"""Seconds after which a worker that Ray still creates counts as one without resources: it waits for them. A worker that
has them is a process that starts, which takes some seconds; with 30 s, workers that started on a very busy machine
looked like tenants."""


@dataclass(slots=True)
class _OwnWorkers:
    """Shoal's own workers on one node."""

    workers: frozenset[tuple[str, bool]]
    """Id, and whether it is alive."""
    since_mono: float
    """Monotonic time since which exactly these workers have been there."""


class ForeignUse:
    """What others than Shoal's jobs have reserved on each node of a shared Ray cluster.

        totals of the node  -  what is free  -  what the workers of Shoal's jobs have reserved  =  what others have

    The three are read one after the other, and Ray reports a reservation some time after it was made or given back. So
    while workers of Shoal come and go on a node, the last value before that is kept: a worker that has just ended must
    not look like another tenant, and one that starts must not hide one.
    Made by the control loop; fed with each new snapshot of the cluster.
    """

    def __init__(self) -> None:
        self._known: dict[str, WorkerNeed] = {}
        """The newest certain reading of each node, by node id."""
        self._own: dict[str, _OwnWorkers] = {}
        self._created_mono: dict[str, float] = {}
        """When each worker that is being created was seen first, by its id."""

    def observe(self, snapshot: ClusterSnapshot, job_ids: Collection[str], mono: float) -> dict[str, WorkerNeed]:
        """What others have reserved, by node id; without the nodes on which they have nothing.

        Args:
            job_ids: jobs with an attempt. Workers of any other job are another service's, or are about to be ended.
        """
        creating = {reservation.worker_id for reservation in snapshot.reservations if not reservation.is_alive}
        self._created_mono = {pod: self._created_mono.get(pod, mono) for pod in creating}
        starting = {pod for pod, since in self._created_mono.items() if mono - since < _CREATING_S}
        own = [r for r in snapshot.reservations if r.job_id in job_ids and (r.is_alive or r.worker_id in starting)]
        reading = reserved_by_others(snapshot.nodes, snapshot.free, own)
        self._observe_own(snapshot, mono)
        busy = {r.node_id for r in own if not r.is_alive}
        for node_id in snapshot.free:
            is_settled = node_id not in busy and mono - self._own[node_id].since_mono >= _SETTLED_S
            if is_settled or node_id not in self._known:
                self._known[node_id] = reading.get(node_id, _NOTHING)
        self._known = {node_id: self._known[node_id] for node_id in snapshot.free}
        return {node_id: used for node_id, used in self._known.items() if used != _NOTHING}

    def _observe_own(self, snapshot: ClusterSnapshot, mono: float) -> None:
        by_node: dict[str, set[tuple[str, bool]]] = {node_id: set() for node_id in snapshot.free}
        for reservation in snapshot.reservations:
            by_node.setdefault(reservation.node_id, set()).add((reservation.worker_id, reservation.is_alive))
        before, self._own = self._own, {}
        for node_id, use in by_node.items():
            workers, known = frozenset(use), before.get(node_id)
            if known is None:
                self._own[node_id] = _OwnWorkers(workers, mono - _SETTLED_S)
            else:
                self._own[node_id] = known if known.workers == workers else _OwnWorkers(workers, mono)


def reserved_by_others(
    nodes: Sequence[Node], free: Mapping[str, WorkerNeed], own: Sequence[Reservation]
) -> dict[str, WorkerNeed]:
    """What others have reserved at this moment, by node id. A node that has not reported what is free is left out."""
    held: dict[str, list[WorkerNeed]] = {}
    for reservation in own:
        held.setdefault(reservation.node_id, []).append(reservation.need)
    reserved = {}
    for node in nodes:
        if node.alive and node.node_id in free:
            left, mine = free[node.node_id], held.get(node.node_id, [])
            used = WorkerNeed(
                cpus=_rest(node.cpus, left.cpus, [need.cpus for need in mine]),
                gpus=_rest(node.gpus, left.gpus, [need.gpus for need in mine]),
                memory_gib=_rest(node.memory_gib, left.memory_gib, [need.memory_gib for need in mine]),
            )
            if used != _NOTHING:
                reserved[node.node_id] = used
    return reserved


def _rest(total: float, free: float, own: list[float]) -> float:
    """The difference, rounded as Ray counts, in units of 0.0001: a sum of floats must not cost a worker."""
    return max(0.0, round(total - free - sum(own), 4))
