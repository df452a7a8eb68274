"""Driver: follows one attempt of one job. Starts or finds its supervisor, stores its reports, sends directives.

One asyncio task of the control loop per attempt. It never decides what a job should do; it passes on the store's row.
"""

from __future__ import annotations

import asyncio
import secrets

from shoal_service.clock import Clock
from shoal_service.cluster.errors import SupervisorGone, SupervisorUnavailable
from shoal_service.control.config import ControlConfig
from shoal_service.control.market.build import is_preempted
from shoal_service.control.profile_store import measured_profile
from shoal_service.control.protocols import Cluster, SupervisorHandle
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.store.driving import DriveRow
from shoal_service.store.store import Store
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_workers.contract.base import WIRE_VERSION
from shoal_workers.contract.job import EndReason

_PULL_WAIT_S = 1.0
_RETRY_S = 0.25
_PULL_PAUSE_S = 0.1
"""Between two pulls, so that the steps of a fast job are stored in batches and not in one transaction each."""


class Driver:
    """Cancelled when the lease is lost; the supervisor goes on without it."""

    def __init__(
        self, store: Store, cluster: Cluster, clock: Clock, config: ControlConfig, row: DriveRow, *, epoch: int
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._clock = clock
        self._config = config
        self._row = row
        self._epoch = epoch
        self._avoid: tuple[AvoidedNode, ...] = ()
        self._server_stops = False
        self._sent: Directive | None = None
        """The last directive that the supervisor received."""
        self._changed = asyncio.Event()

    def update(self, row: DriveRow, avoid: tuple[AvoidedNode, ...], *, server_stops: bool = False) -> None:
        """The newest row of the store, the nodes that must not be used, and whether the attempt has to save and end."""
        self._avoid, self._server_stops = avoid, server_stops
        if self._directive(row) != self._sent:
            self._row = row
            self._changed.set()

    async def run(self) -> None:
        """Until the attempt's end is stored, or its supervisor is dead and the job is back in the queue."""
        try:
            supervisor = await self._attach()
            steering = asyncio.create_task(self._steer(supervisor))
            try:
                await self._follow(supervisor)
            finally:
                steering.cancel()
                await asyncio.gather(steering, return_exceptions=True)
        except SupervisorGone as error:
            await asyncio.to_thread(self._cluster.reap, self._row.id, self._row.attempt)
            await asyncio.to_thread(
                self._store.requeue,
                self._row.id,
                reason=EndReason.SUPERVISOR_LOST,
                message=f"the supervisor of attempt {self._row.attempt} is gone: {error}",
                epoch=self._epoch,
                now=self._clock.time(),
            )

    async def _attach(self) -> SupervisorHandle:
        """Find the supervisor; start it if nothing was ever pulled from one."""
        row = self._row
        found = await asyncio.to_thread(self._cluster.find_supervisor, row.id, row.attempt)
        if found is not None:
            return found
        if row.pulled_seq > 0:
            raise SupervisorGone("no actor of that name is in the cluster")
        config = await asyncio.to_thread(self._supervisor_config)
        avoid = frozenset(node.node_id for node in self._avoid)
        return await asyncio.to_thread(self._cluster.start_supervisor, config, avoid_nodes=avoid)

    async def _follow(self, supervisor: SupervisorHandle) -> None:
        pulled = self._row.pulled_seq
        while True:
            try:
                reports = await supervisor.pull(pulled, _PULL_WAIT_S, self._epoch)
            except SupervisorUnavailable:
                await self._clock.sleep(_RETRY_S)
                continue
            now = self._clock.time()
            await asyncio.to_thread(self._store.apply, self._row.id, reports, epoch=self._epoch, now=now)
            pulled = reports.seq
            if reports.end is not None:
                await supervisor.release(self._epoch)
                await asyncio.to_thread(self._cluster.reap, self._row.id, self._row.attempt)
                return
            await self._clock.sleep(_PULL_PAUSE_S)

    async def _steer(self, supervisor: SupervisorHandle) -> None:
        """Send a directive each time that one of its values changes."""
        while True:
            directive = self._directive(self._row)
            if directive != self._sent:
                try:
                    await supervisor.direct(directive)
                except SupervisorGone:
                    return  # the next `pull` of `_follow` raises the same error
                except SupervisorUnavailable:
                    await self._clock.sleep(_RETRY_S)
                    continue
                self._sent = directive
            await self._changed.wait()
            self._changed.clear()

    def _directive(self, row: DriveRow) -> Directive:
        return Directive(
            epoch=self._epoch,
            version=WIRE_VERSION,
            granted=row.granted_workers or self._last_grant,
            is_preempted=is_preempted(row),
            desired=row.desired,
            elasticity=row.spec.elasticity,
            parallelism=row.spec.parallelism,
            spec_version=row.spec_version,
            avoid=self._avoid,
            server_stops=self._server_stops,
        )

    @property
    def _last_grant(self) -> int:
        """While the attempt is preempted: its grant stays as it was, so that it does not shrink before it saves."""
        return self._sent.granted if self._sent is not None else 1

    def _supervisor_config(self) -> SupervisorConfig:
        row = self._row
        root = (row.spec.checkpoint.url or self._config.checkpoint_url).rstrip("/")
        code_uri = None
        if row.spec.code.archive is not None:
            archive = self._store.get_code(row.spec.code.archive)
            if archive is None:
                raise LookupError(f"code archive {row.spec.code.archive} of job {row.id} is not in the store")
            code_uri = self._cluster.upload_code(archive)
        return SupervisorConfig(
            job_id=row.id,
            attempt=row.attempt,
            version=WIRE_VERSION,
            spec=row.spec,
            checkpoint_root=f"{root}/{row.id}",
            granted=row.granted_workers or self._last_grant,
            epoch=self._epoch,
            spec_version=row.spec_version,
            code_uri=code_uri,
            goodput=row.status.goodput,
            lost=row.status.lost,
            snapshot_key=secrets.token_hex(16),
            profile=measured_profile(self._config.profiles, has_gpu=row.spec.worker.gpus > 0),
            fork_workers=self._config.fork_workers,
            snapshot_scope=self._config.snapshot_scope,
            logs=self._config.logs,
            avoid=self._avoid,
        )
