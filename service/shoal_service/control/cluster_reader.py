"""Reads the nodes of all clusters, with drains, cordons, probation and what others have reserved on them.

    newest report of each gateway  ->  the snapshot of its cluster. A gateway looks again when a node has come or gone,
                                       or an attempt there has begun or ended
    drains, cordons, suspicions, labels of clusters  ->  read from the store each time

The control loop reads in each pass. With several clusters, a pass does not wait for a gateway that looks for long: what
it reported last counts. This module never decides which job uses which node.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shoal_service.clock import Clock
from shoal_service.cluster.errors import ClusterError
from shoal_service.clusters.wire import AttemptKey, ClusterSnapshot, Reservation
from shoal_service.control.background_calls import BackgroundCalls
from shoal_service.control.protocols import Cluster, ClusterMembership, Clusters
from shoal_service.core import nodes as node_rules
from shoal_service.core.nodes import Cordon, Node
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.fleet_views import ClusterSummary, ClusterView, NodeView
from shoal_service.store import Lease, Store, node_records

_log = logging.getLogger(__name__)
READ_S = 1.0
"""Seconds after which a snapshot is looked at again, although it is still the newest one."""
_LOOK_S = 1.0
"""Seconds that a pass waits until the gateway of the only cluster has looked again."""
_LATE_S = 0.3
"""Seconds that it waits if there are several clusters."""
_SETTLED_S = 4.0
"""Seconds within which Ray reports that a killed worker has returned its resources, or that a new one has them."""
_CREATING_S = 120.0
"""Seconds after which a worker that Ray still creates is taken to wait for resources, so it has reserved none. A worker
with resources is a starting process, which takes some seconds. With 30 s, workers that started on a very busy machine
looked like tenants."""
_NOTHING = WorkerNeed()


class ClusterReader:
    """Reads the nodes of all clusters. `view` may be read from any thread; `read` is called by one pass at a time."""

    def __init__(self, store: Store, clusters: Clusters, clock: Clock, max_probation: str) -> None:
        self._store = store
        self._clusters = clusters
        self._clock = clock
        self._max_probation = max_probation
        self._pollers: dict[str, _ClusterPoller] = {}
        self._looks = BackgroundCalls()
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
        """Note that a node or an attempt has changed in the cluster. The next `read` has its gateway look again."""
        if (poller := self._pollers.get(cluster or self._clusters.own)) is not None:
            poller.is_expired = True

    def drop(self) -> None:
        """Cancel the looks that have begun. The lease is lost."""
        self._looks.drop()

    def nodes_of(self, cluster: str) -> tuple[NodeView, ...]:
        """Return the nodes of one cluster from its last report, also if it is unreachable now."""
        poller = self._pollers.get(cluster or self._clusters.own)
        return () if poller is None else poller.nodes

    @property
    def connected_nodes(self) -> tuple[NodeView, ...]:
        """Nodes of the clusters that answer."""
        return tuple(node for poller in self._pollers.values() if not poller.why_away for node in poller.nodes)

    @property
    def connected(self) -> tuple[str, ...]:
        """Names of the clusters that answer."""
        return tuple(name for name, poller in self._pollers.items() if not poller.why_away)

    def why_away(self, cluster: str) -> str:
        """Return why a cluster does not count as connected; empty if it does."""
        name = cluster or self._clusters.own
        poller = self._pollers.get(name)
        return f"no cluster has joined under the name {name!r}" if poller is None else poller.why_away

    def attempts(self, cluster: str) -> frozenset[AttemptKey]:
        """Return the attempts that have actors in the cluster."""
        snapshot = self._pollers[cluster].snapshot
        return frozenset() if snapshot is None else snapshot.attempts

    async def read(self, lease: Lease | None, clusters_of_jobs: Mapping[str, str]) -> bool:
        """Read all clusters. Return False if none answers; the last view stays then, marked as not connected.

        Args:
            clusters_of_jobs: names of the clusters of the jobs with an attempt, by job id.
        """
        await asyncio.to_thread(self._clusters.refresh)
        joined = self._clusters.joined
        self._pollers = {name: self._pollers.get(name) or _ClusterPoller(name, self._clock) for name in joined}
        if lease is not None:  # without it, an order to a gateway is refused
            await self._look_again(joined)
        jobs_by_cluster: dict[str, set[str]] = {name: set() for name in joined}
        for job_id, name in clusters_of_jobs.items():
            jobs_by_cluster.get(name, set()).add(job_id)
        for name, poller in self._pollers.items():
            poller.read(joined[name].cluster, jobs_by_cluster[name])
        self.foreign = {node_id: need for poller in self._pollers.values() for node_id, need in poller.foreign.items()}
        newest = {name: poller.newest for name, poller in self._pollers.items() if poller.newest is not None}
        self.reservations = tuple(reservation for snapshot in newest.values() for reservation in snapshot.reservations)
        self.workers = _count_workers(newest, clusters_of_jobs)
        is_connected = bool(self.connected)
        if is_connected:
            await asyncio.to_thread(self._update_nodes, joined, lease)
        lease = lease or (await asyncio.to_thread(self._store.read_lease) if is_connected else None)
        self._update_view(joined, lease, Counter(clusters_of_jobs.values()))
        return is_connected

    async def _look_again(self, joined: Mapping[str, ClusterMembership]) -> None:
        """Have gateways look at the clusters that have changed, without waiting long for a late one."""
        looks = []
        for name, poller in self._pollers.items():
            cluster = joined[name].cluster
            if poller.is_expired and cluster.connected and (look := self._looks.begin(name, "look", cluster.look_now)):
                poller.is_expired = False
                looks.append(look)
        if looks:
            with suppress(TimeoutError):  # then what was reported last counts
                await self._clock.wait_for(asyncio.wait(looks), _LOOK_S if len(joined) == 1 else _LATE_S)

    def _update_nodes(self, joined: Mapping[str, ClusterMembership], lease: Lease | None) -> None:
        """Add drains, cordons and probation to the nodes, and forget those of dead nodes. Blocks on the store."""
        store = self._store
        with store.read() as tx:
            drains, suspicions = node_records.drains(tx), node_records.suspicions(tx)
            cordons = node_records.cordons(tx)
        nodes_by_cluster: dict[str, tuple[Node, ...]] = {}
        dead: set[str] = set()
        for name, poller in self._pollers.items():
            if poller.why_away or poller.snapshot is None:
                nodes_by_cluster[name] = poller.nodes
                continue
            dead |= {node.node_id for node in poller.snapshot.nodes if not node.alive}
            nodes_by_cluster[name] = _with_cluster(poller.snapshot.nodes, name, joined[name], cordons)
        outdated = dead & {*drains, *suspicions, *cordons}
        if outdated and lease is not None:  # Ray never reuses the id of a dead node, so its rows are of no use
            store.writing(node_records.forget, lease.epoch)(frozenset(outdated))
        for name, nodes in nodes_by_cluster.items():
            poller = self._pollers[name]
            if poller.why_away:
                continue
            described = node_rules.described(nodes, drains, suspicions, self._max_probation)
            poller.nodes = tuple(_node_view(node, poller.foreign) for node in described)

    def _update_view(
        self, joined: Mapping[str, ClusterMembership], lease: Lease | None, num_jobs: Mapping[str, int]
    ) -> None:
        summaries = tuple(poller.summary(joined[name], num_jobs.get(name, 0)) for name, poller in self._pollers.items())
        connected = [summary for summary in summaries if summary.connected]
        if not connected:
            self.view = self.view.model_copy(update={"connected": False, "clusters": summaries})
            return
        self.view = ClusterView(
            connected=True,
            address=self._clusters.of("").address,
            clusters=summaries,
            nodes=tuple(node for poller in self._pollers.values() for node in poller.nodes),
            cpus_total=sum(cluster.cpus_total for cluster in connected),
            cpus_free=sum(cluster.cpus_free for cluster in connected),
            gpus_total=sum(cluster.gpus_total for cluster in connected),
            gpus_free=sum(cluster.gpus_free for cluster in connected),
            owner=lease.owner if lease else "",
            epoch=lease.epoch if lease else 0,
        )


class _ClusterPoller:
    """What is known of one cluster: its newest snapshot, its nodes, and what others have reserved on them."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._foreign_use = ForeignUse()
        self._read_mono = 0.0
        self.snapshot: ClusterSnapshot | None = None
        """The snapshot that counts; None if the cluster is unreachable."""
        self.newest: ClusterSnapshot | None = None
        """The newest snapshot, also if the cluster is unreachable now."""
        self.why_away = "its gateway has not reported yet"
        self.is_expired = False
        """True if something has changed since the gateway has reported."""
        self.nodes: tuple[NodeView, ...] = ()
        self.foreign: dict[str, WorkerNeed] = {}

    def read(self, cluster: Cluster, job_ids: set[str]) -> None:
        """Take the newest snapshot. `job_ids`: jobs with an attempt there. Raises only errors that are not the
        cluster's."""
        try:
            snapshot = cluster.snapshot()
        except ClusterError as error:
            if self.snapshot is not None:
                _log.warning("ray_head.away", extra={"cluster": self.name, "error": str(error)})
            self.snapshot, self.why_away = None, str(error)
            return
        mono = self._clock.monotonic()
        if snapshot is not self.snapshot or mono - self._read_mono >= READ_S:
            self._read_mono = mono
            self.foreign = self._foreign_use.observe(snapshot, job_ids, mono)
        self.snapshot = self.newest = snapshot
        self.why_away = ""

    def summary(self, joined: ClusterMembership, num_jobs: int) -> ClusterSummary:
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


def _with_cluster(
    nodes: Sequence[Node], name: str, joined: ClusterMembership, cordons: Mapping[str, Cordon]
) -> tuple[Node, ...]:
    """Add the cluster's name, labels and cordon to its nodes. Labels and cordon of a node take precedence."""
    cluster_cordon = node_rules.cordon_of_cluster(name, joined.cordon)
    return tuple(
        node.model_copy(
            update={
                "cluster": name,
                "cordon": cordons.get(node.node_id, cluster_cordon),
                "labels": {**joined.labels, **node.labels} if joined.labels else node.labels,
            }
        )
        for node in nodes
    )


def _node_view(node: Node, foreign: Mapping[str, WorkerNeed]) -> NodeView:
    others = foreign.get(node.node_id, _NOTHING)
    return NodeView.of(node, cpus_of_others=others.cpus, gpus_of_others=others.gpus)


def _count_workers(
    snapshots: Mapping[str, ClusterSnapshot], clusters_of_jobs: Mapping[str, str]
) -> dict[str, dict[str, int]]:
    """Count the living workers by job and node, without those of an earlier attempt in another cluster."""
    workers: dict[str, dict[str, int]] = {}
    for name, snapshot in snapshots.items():
        for reservation in snapshot.reservations:
            if reservation.is_alive and clusters_of_jobs.get(reservation.job_id, name) == name:
                by_node = workers.setdefault(reservation.job_id, {})
                by_node[reservation.node_id] = by_node.get(reservation.node_id, 0) + 1
    return workers


@dataclass(slots=True)
class _WorkerSet:
    """Shoal's workers on one node."""

    workers: frozenset[tuple[str, bool]]
    """Pairs: id of a worker, and True if it is alive."""
    since_mono: float
    """Monotonic time since which exactly these workers have been on the node."""


class ForeignUse:
    """Finds what others than Shoal's jobs have reserved on each node of a shared Ray cluster.

        totals of the node  -  what is free  -  what the workers of Shoal's jobs have reserved  =  what others have

    The three are read one after the other, and Ray reports a reservation some time after it was made or given back.
    While workers of Shoal come and go on a node, the last certain value counts: a worker that has just ended must not
    look like another tenant, and a worker that starts must not hide one.
    """

    def __init__(self) -> None:
        self._certain: dict[str, WorkerNeed] = {}
        """What others have on each node, from the last time when that was certain."""
        self._workers: dict[str, _WorkerSet] = {}
        self._created_mono: dict[str, float] = {}
        """Monotonic time at which a snapshot first had each worker that is being created, by its id."""

    def observe(self, snapshot: ClusterSnapshot, job_ids: Collection[str], mono: float) -> dict[str, WorkerNeed]:
        """Return what others have reserved, by node id; without the nodes on which they have nothing.

        Args:
            job_ids: jobs with an attempt. Workers of any other job belong to another service, or are about to end.
        """
        creating = {reservation.worker_id for reservation in snapshot.reservations if not reservation.is_alive}
        self._created_mono = {worker_id: self._created_mono.get(worker_id, mono) for worker_id in creating}
        starting = {worker_id for worker_id, since in self._created_mono.items() if mono - since < _CREATING_S}
        reservations = [
            reservation
            for reservation in snapshot.reservations
            if reservation.job_id in job_ids and (reservation.is_alive or reservation.worker_id in starting)
        ]
        current = reserved_by_others(snapshot.nodes, snapshot.free, reservations)
        self._observe_workers(snapshot, mono)
        creating_nodes = {reservation.node_id for reservation in reservations if not reservation.is_alive}
        for node_id in snapshot.free:
            is_settled = node_id not in creating_nodes and mono - self._workers[node_id].since_mono >= _SETTLED_S
            if is_settled or node_id not in self._certain:
                self._certain[node_id] = current.get(node_id, _NOTHING)
        self._certain = {node_id: self._certain[node_id] for node_id in snapshot.free}
        return {node_id: used for node_id, used in self._certain.items() if used != _NOTHING}

    def _observe_workers(self, snapshot: ClusterSnapshot, mono: float) -> None:
        by_node: dict[str, set[tuple[str, bool]]] = {node_id: set() for node_id in snapshot.free}
        for reservation in snapshot.reservations:
            by_node.setdefault(reservation.node_id, set()).add((reservation.worker_id, reservation.is_alive))
        before, self._workers = self._workers, {}
        for node_id, pairs in by_node.items():
            workers, last = frozenset(pairs), before.get(node_id)
            if last is None:
                self._workers[node_id] = _WorkerSet(workers, mono - _SETTLED_S)
            else:
                self._workers[node_id] = last if last.workers == workers else _WorkerSet(workers, mono)


def reserved_by_others(
    nodes: Sequence[Node], free: Mapping[str, WorkerNeed], own: Sequence[Reservation]
) -> dict[str, WorkerNeed]:
    """Return what others have reserved now, by node id. `own`: reservations of Shoal's jobs.

    A node that has not reported what is free is left out.
    """
    needs_by_node: dict[str, list[WorkerNeed]] = {}
    for reservation in own:
        needs_by_node.setdefault(reservation.node_id, []).append(reservation.need)
    reserved = {}
    for node in nodes:
        if node.alive and node.node_id in free:
            node_free, needs = free[node.node_id], needs_by_node.get(node.node_id, [])
            used = WorkerNeed(
                cpus=_subtract(node.cpus, node_free.cpus, [need.cpus for need in needs]),
                gpus=_subtract(node.gpus, node_free.gpus, [need.gpus for need in needs]),
                memory_gib=_subtract(node.memory_gib, node_free.memory_gib, [need.memory_gib for need in needs]),
            )
            if used != _NOTHING:
                reserved[node.node_id] = used
    return reserved


def _subtract(total: float, free: float, own: list[float]) -> float:
    """Subtract from a total, and round as Ray counts, in units of 0.0001."""
    # without rounding, the error of a sum of floats could cost a worker
    return max(0.0, round(total - free - sum(own), 4))
