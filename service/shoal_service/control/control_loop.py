"""ControlLoop: the acting half of the control plane. Holds the lease, starts queued jobs, runs one driver per attempt.

    lease (renewed)  ->  one pass: the store's jobs + the cluster's nodes  ->  scheduling.decide  ->  store, drivers
                         one driver task per attempt: supervisor.pull -> store.apply, one transaction per answer

Run by `shoal serve`. Training never depends on it: supervisors and workers go on without a control plane, and the next
holder of the lease finds them by name. Every write is guarded by the lease's epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from shoal_service.clock import Clock
from shoal_service.cluster.errors import ClusterUnreachable, ConnectionStale
from shoal_service.cluster.probation import Probation
from shoal_service.control.config import ControlConfig
from shoal_service.control.driver import Driver
from shoal_service.control.ownership import is_gone
from shoal_service.control.protocols import Cluster, ClusterSnapshot
from shoal_service.core import nodes as node_rules
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.desired import Desired
from shoal_service.core.nodes import Node, NodeSuspicion
from shoal_service.core.scheduling.first_come import (
    Decision,
    Grant,
    JobDemand,
    NodeCapacity,
    Start,
    Wait,
    WorkerNeed,
    decide,
    without_room,
)
from shoal_service.store.driving import DriveRow
from shoal_service.store.errors import LeaseLost, RequestConflict
from shoal_service.store.lease import Lease
from shoal_service.store.store import Store
from shoal_service.views import ClusterView, NodeView
from shoal_workers.contract.job import EndReason, JobState

_log = logging.getLogger(__name__)
_PASS_S = 1.0
"""The cluster is read at least this often; a change in the store starts a pass immediately."""
_MIN_PASS_S = 0.2
"""A burst of changes causes one pass, not one pass each."""
_IDLE_SHARE = 9.0
"""A pause is at least this many times as long as the pass before it: a long queue must not take the time of the
HTTP edge."""
_MAX_PAUSE_S = 3.0
_SNAPSHOT_S = 5.0
_MAX_NOTES = 50
"""Only the first jobs of the queue get a note why they wait. Each note is a write, and the reason of the first job is
also that of the others."""


class ControlLoop:
    """`run` returns after `stop` is set, or after `save_and_end`. `snapshot` may be called from any thread."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        clock: Clock,
        config: ControlConfig,
        *,
        reconnected: Callable[[], None] = lambda: None,
    ) -> None:
        """`reconnected` is called on the loop after each new connection to the cluster."""
        self._store = store
        self._cluster = cluster
        self._clock = clock
        self._config = config
        self._lease: Lease | None = None
        self._renewed_mono = 0.0
        self._drivers: dict[tuple[str, int], tuple[Driver, asyncio.Task[None]]] = {}
        self._notes: dict[str, str] = {}
        self._quarantined: frozenset[str] = frozenset()
        self._probation = Probation(store, cluster, clock)
        self._reconnected = reconnected
        self._snapshot_task: asyncio.Task[ClusterSnapshot] | None = None
        self._woken = asyncio.Event()
        self._show_saving: Callable[[Sequence[DriveRow]], None] | None = None
        """Not None: the server stops, and every attempt saves and ends."""
        self._is_saved = False
        self.given_up: tuple[tuple[str, int], ...] = ()
        """Job and number of each attempt that was not saved when the server ended the cluster."""
        self._view = ClusterView(
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

    def snapshot(self) -> ClusterView:
        """The cluster at the time of the last pass."""
        return self._view

    def save_and_end(self, show: Callable[[Sequence[DriveRow]], None]) -> None:
        """The server stops, and the cluster with it: no attempt begins any more, each one saves and ends, and its job
        returns to the queue. `run` returns once none is left. From the loop's thread.

        Args:
            show: called after each pass with the jobs that still have an attempt.
        """
        self._show_saving = show
        self._woken.set()

    async def run(self, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        with self._store.subscribe(lambda _: loop.call_soon_threadsafe(self._woken.set)):
            while not stop.is_set() and not self._is_saved:
                began_mono = self._clock.monotonic()
                try:
                    await self._pass()
                except LeaseLost as error:
                    _log.warning("lease.lost", extra={"error": str(error)})
                    await self._stop_driving()
                except ClusterUnreachable as error:
                    _log.warning("cluster.unreachable", extra={"error": str(error)})
                except Exception:
                    _log.exception("control.pass_failed")  # the next pass starts afresh
                pause_s = max(_MIN_PASS_S, _IDLE_SHARE * (self._clock.monotonic() - began_mono))
                await self._wait_for_any(stop, timeout_s=min(pause_s, _MAX_PAUSE_S))
                await self._wait_for_any(stop, self._woken, timeout_s=_PASS_S)
                self._woken.clear()
        lease = self._lease
        await self._stop_driving()
        if self._show_saving is not None and not self._is_saved and lease is not None:
            await asyncio.to_thread(self._give_up, lease)
        await asyncio.to_thread(self._store.release_lease, self._config.owner)  # nothing happens without the lease

    async def _pass(self) -> None:
        now = self._clock.time()
        mono = self._clock.monotonic()  # not the wall clock, which may have been set back
        if self._lease is None or mono - self._renewed_mono > self._config.lease_ttl_s / 3:
            self._lease = await asyncio.to_thread(self._acquire_lease, now)
            self._renewed_mono = mono
        reachable = await self._read_cluster()
        if self._lease is None:
            await self._stop_driving()
            self._is_saved = self._show_saving is not None  # by the control plane that holds the lease
            return
        rows = await self._readable_jobs(self._lease)
        if self._show_saving is not None:
            self._drive_all(rows, self._lease)
            with_attempt = [row for row in rows if row.state is not JobState.QUEUED]
            self._show_saving(with_attempt)
            self._forget_ended()
            self._is_saved = not with_attempt and not self._drivers
        elif reachable:
            await self._schedule(rows, self._lease)
            await self._probation.consider(self._view.nodes, epoch=self._lease.epoch, now=self._clock.time())
        else:
            self._drive_all(rows, self._lease)  # supervisors go on, and can be directed to pause or to cancel
        self._forget_ended()

    def _acquire_lease(self, now: float) -> Lease | None:
        """None while another control plane, which may be alive, holds it."""
        ttl_s = self._config.lease_ttl_s
        lease = self._store.acquire_lease(self._config.owner, ttl_s=ttl_s, now=now)
        if lease is None and (other := self._store.current_lease()) is not None and is_gone(other.owner):
            self._store.release_lease(other.owner)
            lease = self._store.acquire_lease(self._config.owner, ttl_s=ttl_s, now=now)
        return lease

    async def _read_cluster(self) -> bool:
        """False: the head does not answer; the last view is kept, marked as not connected."""
        try:
            snapshot = await self._take_snapshot()
        except ConnectionStale as error:
            _log.warning("cluster.reconnect", extra={"error": str(error)})
            self._probation.stop()
            await self._drop_drivers()  # their handles belong to the old connection
            await asyncio.to_thread(self._cluster.reconnect)
            self._reconnected()
            return False
        except ClusterUnreachable as error:
            if self._view.connected:
                _log.warning("ray_head.away", extra={"error": str(error)})
            self._view = self._view.model_copy(update={"connected": False})
            return False
        nodes = await asyncio.to_thread(self._described, snapshot)
        free = snapshot.free
        alive = [n for n in nodes if n.alive]
        lease = self._lease or await asyncio.to_thread(self._store.current_lease)
        self._view = ClusterView(
            connected=self._cluster.connected,
            address=self._cluster.address,
            nodes=tuple(NodeView.of(node) for node in nodes),
            cpus_total=sum(n.cpus for n in alive),
            cpus_free=free.get("CPU", 0.0),
            gpus_total=sum(n.gpus for n in alive),
            gpus_free=free.get("GPU", 0.0),
            owner=lease.owner if lease else "",
            epoch=lease.epoch if lease else 0,
        )
        return True

    async def _take_snapshot(self) -> ClusterSnapshot:
        """One call at a time: a call that hangs in Ray is waited for again in the next pass."""
        if self._snapshot_task is None or self._snapshot_task.done():
            self._snapshot_task = asyncio.create_task(asyncio.to_thread(self._cluster.snapshot))
        try:
            return await self._clock.wait_for(asyncio.shield(self._snapshot_task), _SNAPSHOT_S)
        except TimeoutError:
            raise ClusterUnreachable(f"no answer from the Ray head within {_SNAPSHOT_S:g} s") from None

    def _described(self, snapshot: ClusterSnapshot) -> tuple[Node, ...]:
        """The nodes with their drains and probation; blocks on the store."""
        drains, suspicions = self._store.drains(), self._store.suspicions()
        gone = {n.node_id for n in snapshot.nodes if not n.alive} & {*drains, *suspicions}
        if gone and self._lease is not None:
            self._store.forget_nodes(frozenset(gone), epoch=self._lease.epoch)
        suspected = {
            s.node_id: NodeSuspicion(s.reason, s.since, s.next_test_at, s.job_ids, s.num_tests)
            for s in suspicions.values()
        }
        return node_rules.described(snapshot.nodes, drains, suspected, self._config.max_probation)

    async def _schedule(self, rows: list[DriveRow], lease: Lease) -> None:
        by_id = {row.id: row for row in rows}
        capacity = self._capacity([row.id for row in rows])
        decisions = decide([_demand(row) for row in rows], capacity)
        waits = [d for d in decisions if isinstance(d, Wait)][:_MAX_NOTES]
        changes = [d for d in decisions if not isinstance(d, Wait)]
        for decision in (*changes, *waits):
            await self._carry_out(decision, by_id[decision.job_id], lease)
        self._drive_all(await asyncio.to_thread(self._store.jobs_to_drive) if changes else rows, lease)

    def _drive_all(self, rows: list[DriveRow], lease: Lease) -> None:
        cramped = without_room([_demand(row) for row in rows], self._capacity([row.id for row in rows]))
        for row in rows:
            if row.state is not JobState.QUEUED:
                avoid = node_rules.avoided(self._view.nodes, row.id)
                if row.id in cramped:
                    avoid = tuple(node.model_copy(update={"is_replaceable": False}) for node in avoid)
                self._drive(row, lease, avoid)

    async def _carry_out(self, decision: Decision, row: DriveRow, lease: Lease) -> None:
        now = self._clock.time()
        match decision:
            case Start(job_id=job_id, workers=workers):
                self._notes.pop(job_id, None)
                try:
                    await asyncio.to_thread(
                        self._store.begin_attempt, job_id, workers=workers, epoch=lease.epoch, now=now
                    )
                except RequestConflict:
                    pass  # paused or cancelled since the decision
            case Grant(job_id=job_id, workers=workers, reason=reason):
                await asyncio.to_thread(
                    self._store.set_grant, job_id, workers=workers, reason=reason, epoch=lease.epoch, now=now
                )
            case Wait(job_id=job_id, reason=reason):
                if row.status.message != reason and self._notes.get(job_id) != reason:
                    self._notes[job_id] = reason
                    await asyncio.to_thread(self._store.set_queue_note, job_id, reason, epoch=lease.epoch, now=now)

    def _capacity(self, job_ids: list[str]) -> list[NodeCapacity]:
        return [
            NodeCapacity(node_id=n.node_id, cpus=n.cpus, gpus=n.gpus, memory_gib=n.memory_gib)
            for n in node_rules.usable(self._view.nodes, job_ids)
        ]

    def _drive(self, row: DriveRow, lease: Lease, avoid: tuple[AvoidedNode, ...]) -> None:
        """One driver per attempt; an existing one gets the newest row."""
        key = (row.id, row.attempt)
        if key not in self._drivers:
            driver = Driver(self._store, self._cluster, self._clock, self._config, row, epoch=lease.epoch)
            driver.update(row, avoid, server_stops=self._show_saving is not None)
            task = asyncio.get_running_loop().create_task(driver.run(), name=f"drive {row.id}")
            self._drivers[key] = (driver, task)
        self._drivers[key][0].update(row, avoid, server_stops=self._show_saving is not None)

    def _forget_ended(self) -> None:
        for key, (_, task) in list(self._drivers.items()):
            if task.done():
                del self._drivers[key]
                error = None if task.cancelled() else task.exception()
                if isinstance(error, LeaseLost):
                    raise error
                if error is not None:
                    fields = {"job": key[0], "attempt": key[1]}
                    _log.error("driver.failed", exc_info=error, extra=fields)  # the next pass starts another

    def _give_up(self, lease: Lease) -> None:
        """The cluster ends before these attempts are saved: their jobs return to the queue with what they have lost."""
        for row in self._store.jobs_to_drive(max_queued=0):
            try:
                self._store.requeue(
                    row.id,
                    reason=EndReason.CLUSTER_LOST,
                    message=f"the server ended the Ray cluster before attempt {row.attempt} was saved",
                    epoch=lease.epoch,
                    now=self._clock.time(),
                )
            except LeaseLost as error:
                _log.warning("lease.lost", extra={"error": str(error)})
                return
            self.given_up = (*self.given_up, (row.id, row.attempt))

    async def _readable_jobs(self, lease: Lease) -> list[DriveRow]:
        """Jobs that cannot be read go into quarantine, and the others go on."""
        unreadable: dict[str, str] = {}
        rows = await asyncio.to_thread(self._store.jobs_to_drive, unreadable=unreadable)
        if unreadable.keys() - self._quarantined:
            for job_id in sorted(unreadable.keys() - self._quarantined):
                _log.error("control.job_unreadable", extra={"job": job_id, "reason": unreadable[job_id]})
            await asyncio.to_thread(self._store.quarantine, unreadable, epoch=lease.epoch, now=self._clock.time())
        self._quarantined = frozenset(unreadable)
        return rows

    async def _stop_driving(self) -> None:
        """Without the lease nothing is driven; supervisors go on alone."""
        self._lease = None
        self._probation.stop()
        await self._drop_drivers()

    async def _drop_drivers(self) -> None:
        tasks = [task for _, task in self._drivers.values()]
        self._drivers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_any(self, *events: asyncio.Event, timeout_s: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await self._clock.wait_for(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED), timeout_s)
        except TimeoutError:
            pass
        finally:
            for wait in waits:
                wait.cancel()


def _demand(row: DriveRow) -> JobDemand:
    worker, elasticity = row.spec.worker, row.spec.elasticity
    return JobDemand(
        job_id=row.id,
        priority=row.priority,
        created_at=row.created_at,
        min_workers=elasticity.min_workers,
        max_workers=elasticity.max_workers,
        need=WorkerNeed(cpus=worker.cpus, gpus=worker.gpus, memory_gib=worker.memory_gib),
        granted_workers=row.granted_workers if row.state is not JobState.QUEUED else 0,
        leaving=row.desired is not Desired.RUN,
    )
