"""ClusterReader: the nodes of the Ray cluster, with drains, cordons, probation and what others have reserved on them.

The newest report of the gateway is read once a second; one is asked for when a node has come or gone, or an attempt
has begun or ended; drains, cordons, maintenance windows and
suspicions are read from the store each time. Called by the control loop in each pass. It never decides which job uses
which node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from shoal_service.clock import Clock
from shoal_service.cluster.errors import ClusterUnreachable
from shoal_service.clusters.snapshot import AttemptKey, ClusterSnapshot, Reservation
from shoal_service.control.market import maintenance
from shoal_service.control.market.foreign import ForeignUse
from shoal_service.control.protocols import Cluster
from shoal_service.core import nodes as node_rules
from shoal_service.core.nodes import Drain, Node, NodeSuspicion
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.store.lease import Lease
from shoal_service.store.store import Store
from shoal_service.views import ClusterView, NodeView

_log = logging.getLogger(__name__)
READ_S = 1.0
"""The cluster is read again after this time."""
_SNAPSHOT_S = 5.0


class ClusterReader:
    """`view` may be read from any thread; `read` is called by one pass at a time."""

    def __init__(self, store: Store, cluster: Cluster, clock: Clock, max_probation: str) -> None:
        self._store = store
        self._cluster = cluster
        self._clock = clock
        self._max_probation = max_probation
        self._foreign_use = ForeignUse()
        self._snapshot: ClusterSnapshot | None = None
        self._is_expired = False
        """Something has changed since the gateway has reported."""
        self._read_mono = 0.0
        self._task: asyncio.Task[ClusterSnapshot] | None = None
        self._window_drains: dict[str, Drain] = {}
        """For maintenance windows, as of the last `read`."""
        self.foreign: dict[str, WorkerNeed] = {}
        """What others than Shoal's jobs have reserved, by node id."""
        self.workers: dict[str, dict[str, int]] = {}
        """Workers that are alive, by job and node."""
        self.reservations: tuple[Reservation, ...] = ()
        """Of the workers of all jobs."""
        self.attempts: frozenset[AttemptKey] = frozenset()
        """Those that have actors in the cluster."""
        self.view = ClusterView(
            connected=False,
            address=cluster.address,
            nodes=(),
            cpus_total=0,
            cpus_free=0,
            gpus_total=0,
            gpus_free=0,
            owner="",
            epoch=0,
        )

    def expire(self) -> None:
        """A node or an attempt has changed: the next `read` has the cluster looked at."""
        self._snapshot, self._is_expired = None, True

    async def read(self, lease: Lease | None, job_ids: Collection[str]) -> bool:
        """False: the cluster does not answer; the last view is kept, marked as not connected."""
        mono = self._clock.monotonic()
        if self._snapshot is None or mono - self._read_mono >= READ_S:
            try:
                snapshot = await self._take_snapshot()
            except ClusterUnreachable as error:
                if self.view.connected:
                    _log.warning("ray_head.away", extra={"error": str(error)})
                self._snapshot = None
                self.view = self.view.model_copy(update={"connected": False})
                return False
            finally:
                self._is_expired = False
            self._snapshot, self._read_mono = snapshot, mono
            self.workers, self.reservations = _by_job(snapshot), snapshot.reservations
            self.attempts = snapshot.attempts
            self.foreign = self._foreign_use.observe(snapshot, job_ids, mono)
        nodes = await asyncio.to_thread(self._described, self._snapshot, lease)
        lease = lease or await asyncio.to_thread(self._store.current_lease)
        alive, free = [n for n in nodes if n.alive], self._snapshot.free.values()
        self.view = ClusterView(
            connected=self._cluster.connected,
            address=self._cluster.address,
            nodes=tuple(self._node_view(node) for node in nodes),
            cpus_total=sum(n.cpus for n in alive),
            cpus_free=sum(one.cpus for one in free),
            gpus_total=sum(n.gpus for n in alive),
            gpus_free=sum(one.gpus for one in free),
            owner=lease.owner if lease else "",
            epoch=lease.epoch if lease else 0,
        )
        return True

    def _node_view(self, node: Node) -> NodeView:
        others = self.foreign.get(node.node_id, WorkerNeed())
        return NodeView.of(node, cpus_of_others=others.cpus, gpus_of_others=others.gpus)

    async def _take_snapshot(self) -> ClusterSnapshot:
        """One call at a time: a call that hangs is waited for again in the next pass."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(asyncio.to_thread(self._cluster.snapshot, fresh=self._is_expired))
            self._task.add_done_callback(_retrieve)
        try:
            return await self._clock.wait_for(asyncio.shield(self._task), _SNAPSHOT_S)
        except TimeoutError:
            raise ClusterUnreachable(f"no answer from the Ray head within {_SNAPSHOT_S:g} s") from None

    def _described(self, snapshot: ClusterSnapshot, lease: Lease | None) -> tuple[Node, ...]:
        """The nodes with their drains, cordons, windows and probation; blocks on the store."""
        requested, suspicions, cordons = self._store.drains(), self._store.suspicions(), self._store.cordons()
        gone = {n.node_id for n in snapshot.nodes if not n.alive} & {*requested, *suspicions, *cordons}
        if gone and lease is not None:
            self._store.forget_nodes(frozenset(gone), epoch=lease.epoch)
        suspected = {
            s.node_id: NodeSuspicion(s.reason, s.since, s.next_test_at, s.job_ids, s.num_tests)
            for s in suspicions.values()
        }
        nodes = tuple(node.model_copy(update={"cordon": cordons.get(node.node_id)}) for node in snapshot.nodes)
        windows, now = self._store.windows(), self._clock.time()
        lead = maintenance.lead_s(self._store.drain_times() if windows else ())
        self._window_drains = maintenance.window_drains(nodes, windows, lead, now, self._window_drains)
        drains = maintenance.combined(requested, self._window_drains)
        found = node_rules.described(nodes, drains, suspected, self._max_probation)
        return maintenance.with_windows(found, windows, lead, now) if windows else found


def _retrieve(task: asyncio.Task[ClusterSnapshot]) -> None:
    """The error of a call that nobody waits for any more is not reported as a lost one."""
    if not task.cancelled():
        task.exception()


def _by_job(snapshot: ClusterSnapshot) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for one in snapshot.reservations:
        if one.is_alive:
            on_nodes = found.setdefault(one.job_id, {})
            on_nodes[one.node_id] = on_nodes.get(one.node_id, 0) + 1
    return found
