"""ControlLoop: the half of the control plane that acts. Holds the lease, starts queued jobs, follows supervisors.

    lease (renewed)  ->  one pass: the store's jobs + the cluster's nodes  ->  scheduling.decide  ->  store, drivers
                         one driver task per attempt: supervisor.pull -> store.apply, one transaction per answer

Training never depends on it: supervisors and shards go on without a control plane, and whoever holds the lease next
finds them by name. Everything that it writes is guarded by the lease's epoch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal_service.cluster.probation import Probation
from shoal_service.cluster.ray_cluster import Cluster, ClusterSnapshot, ClusterUnreachable, ConnectionStale
from shoal_service.control.driver import Driver
from shoal_service.control.ownership import is_gone
from shoal_service.core import nodes as node_rules
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.desired import Desired
from shoal_service.core.nodes import Node, NodeSuspicion
from shoal_service.core.scheduling import Decision, Grant, JobDemand, NodeCapacity, Start, Wait, WorkerNeed, decide
from shoal_service.planner import HardwareProfile
from shoal_service.store.driving import DriveRow
from shoal_service.store.errors import LeaseLost, RequestConflict
from shoal_service.store.lease import Lease
from shoal_service.store.store import Store
from shoal_service.views import ClusterView, NodeView
from shoal_workers.contract.job import JobState

_log = logging.getLogger(__name__)
_PASS_S = 1.0
"""At least so often the cluster is looked at; changes in the store wake the loop at once."""
_MIN_PASS_S = 0.2
"""A burst of changes is one pass, not one each."""
_IDLE_SHARE = 9.0
"""A pause is at least so many times as long as the pass before it: a long queue must not take the HTTP edge's time."""
_MAX_PAUSE_S = 3.0
_LOOK_S = 5.0
_MAX_NOTES = 50
"""Only the head of the queue is told why it waits: each note is a write, and the head's reason is everybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    owner: str
    """Unique per control plane process."""
    lease_ttl_s: float
    checkpoint_url: str
    """Where jobs without a checkpoint.url of their own save."""
    profiles: tuple[HardwareProfile, ...] = ()
    """Measured on nodes of this cluster; the planner goes by them where there are any."""
    fork_workers: bool = True
    """See SupervisorConfig."""


class ControlLoop:
    """`run` until told to stop. `snapshot` may be read from any thread."""

    def __init__(
        self, store: Store, cluster: Cluster, config: LoopConfig, *, reconnected: Callable[[], None] = lambda: None
    ) -> None:
        """`reconnected` is called on the loop after each time that the cluster was connected to anew."""
        self._store = store
        self._cluster = cluster
        self._config = config
        self._lease: Lease | None = None
        self._drivers: dict[tuple[str, int], tuple[Driver, asyncio.Task[None]]] = {}
        self._notes: dict[str, str] = {}
        self._probation = Probation(store, cluster)
        self._reconnected = reconnected
        self._looking: asyncio.Task[ClusterSnapshot] | None = None
        self._view = ClusterView(
            connected=False, address=cluster.address, nodes=(), cpus_total=0, cpus_free=0, gpus_total=0, gpus_free=0,
            owner="", epoch=0,
        )  # fmt: skip

    def snapshot(self) -> ClusterView:
        """The cluster as the last pass saw it."""
        return self._view

    async def run(self, stop: asyncio.Event) -> None:
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        with self._store.subscribe(lambda _: loop.call_soon_threadsafe(woken.set)):
            while not stop.is_set():
                began_mono = time.monotonic()
                try:
                    await self._pass()
                except LeaseLost as error:
                    _log.warning("lease lost", extra={"error": str(error)})
                    await self._let_go()
                except ClusterUnreachable as error:
                    _log.warning("cluster unreachable", extra={"error": str(error)})
                except Exception:
                    _log.exception("control pass failed")  # the loop outlives a bad pass: the next one starts afresh
                pause_s = max(_MIN_PASS_S, _IDLE_SHARE * (time.monotonic() - began_mono))
                await _first_of(stop, timeout_s=min(pause_s, _MAX_PAUSE_S))
                await _first_of(stop, woken, timeout_s=_PASS_S)
                woken.clear()
        await self._let_go()
        if self._lease is not None:
            await asyncio.to_thread(self._store.release_lease, self._config.owner)

    async def _pass(self) -> None:
        now = time.time()
        if self._lease is None or now > self._lease.expires_at - 2 * self._config.lease_ttl_s / 3:
            self._lease = await asyncio.to_thread(self._acquire_lease, now)
        reachable = await self._look_at_cluster()
        if self._lease is None:
            await self._let_go()
            return
        rows = await asyncio.to_thread(self._store.jobs_to_drive)
        if reachable:
            await self._schedule(rows, self._lease)
            await self._probation.consider(self._view.nodes, epoch=self._lease.epoch, now=time.time())
        else:
            self._drive_all(rows, self._lease)  # supervisors live, and may be asked to pause or to cancel
        self._forget_ended()

    def _acquire_lease(self, now: float) -> Lease | None:
        """None while another control plane holds it that may be alive."""
        ttl_s = self._config.lease_ttl_s
        lease = self._store.acquire_lease(self._config.owner, ttl_s=ttl_s, now=now)
        if lease is None and (other := self._store.current_lease()) is not None and is_gone(other.owner):
            self._store.release_lease(other.owner)
            lease = self._store.acquire_lease(self._config.owner, ttl_s=ttl_s, now=now)
        return lease

    async def _look_at_cluster(self) -> bool:
        """False: the head does not answer; what was seen last is kept."""
        try:
            sight = await self._sight()
        except ConnectionStale as error:
            _log.warning("connecting to the Ray cluster anew", extra={"error": str(error)})
            self._probation.stop()
            await self._drop_drivers()  # before: their handles belong to the old connection
            await asyncio.to_thread(self._cluster.reconnect)
            self._reconnected()
            return False
        except ClusterUnreachable as error:
            if self._view.connected:
                _log.warning("the Ray head is away; jobs go on", extra={"error": str(error)})
            self._view = self._view.model_copy(update={"connected": False})
            return False
        nodes = await asyncio.to_thread(self._described, sight)
        free = sight.free
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

    async def _sight(self) -> ClusterSnapshot:
        """One look at a time: one that is stuck in Ray is waited for again, not joined by another."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(asyncio.to_thread(self._cluster.look))
        await asyncio.wait({self._looking}, timeout=_LOOK_S)
        if not self._looking.done():
            raise ClusterUnreachable(f"no answer from the Ray head within {_LOOK_S:g} s")
        return self._looking.result()

    def _described(self, sight: ClusterSnapshot) -> tuple[Node, ...]:
        """With drains and probation; blocks on the store."""
        drains, suspicions = self._store.drains(), self._store.suspicions()
        gone = {n.node_id for n in sight.nodes if not n.alive} & {*drains, *suspicions}
        if gone and self._lease is not None:
            self._store.forget_nodes(frozenset(gone), epoch=self._lease.epoch)
        doubts = {s.node_id: NodeSuspicion(s.reason, s.since, s.next_test_at) for s in suspicions.values()}
        return node_rules.described(sight.nodes, drains, doubts)

    async def _schedule(self, rows: list[DriveRow], lease: Lease) -> None:
        by_id = {row.id: row for row in rows}
        decisions = decide([_demand(row) for row in rows], self._capacity())
        waits = [d for d in decisions if isinstance(d, Wait)][:_MAX_NOTES]
        changes = [d for d in decisions if not isinstance(d, Wait)]
        for decision in (*changes, *waits):
            await self._carry_out(decision, by_id[decision.job_id], lease)
        self._drive_all(await asyncio.to_thread(self._store.jobs_to_drive) if changes else rows, lease)

    def _drive_all(self, rows: list[DriveRow], lease: Lease) -> None:
        avoid = node_rules.avoided(self._view.nodes)
        for row in rows:
            if row.state is not JobState.QUEUED:
                self._drive(row, lease, avoid)

    async def _carry_out(self, decision: Decision, row: DriveRow, lease: Lease) -> None:
        now = time.time()
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

    def _capacity(self) -> list[NodeCapacity]:
        return [
            NodeCapacity(node_id=n.node_id, cpus=n.cpus, gpus=n.gpus, memory_gib=n.memory_gib)
            for n in node_rules.usable(self._view.nodes)
        ]

    def _drive(self, row: DriveRow, lease: Lease, avoid: tuple[AvoidedNode, ...]) -> None:
        """A driver per attempt; an existing one is told what is desired now."""
        key = (row.id, row.attempt)
        if key not in self._drivers:
            url = self._config.checkpoint_url
            driver = Driver(
                self._store, self._cluster, row,
                epoch=lease.epoch, checkpoint_url=url, profiles=self._config.profiles,
                fork_workers=self._config.fork_workers,
            )  # fmt: skip
            driver.want(row, avoid)
            task = asyncio.get_running_loop().create_task(driver.run(), name=f"drive {row.id}")
            self._drivers[key] = (driver, task)
        self._drivers[key][0].want(row, avoid)

    def _forget_ended(self) -> None:
        for key, (_, task) in list(self._drivers.items()):
            if task.done():
                del self._drivers[key]
                error = None if task.cancelled() else task.exception()
                if isinstance(error, LeaseLost):
                    raise error
                if error is not None:
                    _log.error("driver failed; the next pass starts another", exc_info=error, extra={"job": key[0]})

    async def _let_go(self) -> None:
        """Without the lease nothing is driven; supervisors go on by themselves."""
        self._lease = None
        self._probation.stop()
        await self._drop_drivers()

    async def _drop_drivers(self) -> None:
        tasks = [task for _, task in self._drivers.values()]
        self._drivers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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


async def _first_of(*events: asyncio.Event, timeout_s: float) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
