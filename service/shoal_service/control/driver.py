"""Driver: follows one attempt of one job. Starts or finds its supervisor, stores its reports, sends directives."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

from shoal_service.cluster.ray_cluster import Cluster, SupervisorGone, SupervisorHandle, SupervisorUnavailable
from shoal_service.control.profile_store import measured_profile
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.planner import HardwareProfile
from shoal_service.store.driving import DriveRow
from shoal_service.store.store import Store
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_workers.contract.job import EndReason

_log = logging.getLogger(__name__)
_PULL_WAIT_S = 1.0
_RETRY_S = 0.25
_LINGER_S = 0.1
"""Between two answers: steps of a fast job are stored in batches, not one transaction each."""


class Driver:
    """Lives on the control loop; dropped, not stopped, when the lease is lost."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        row: DriveRow,
        *,
        epoch: int,
        checkpoint_url: str,
        profiles: Sequence[HardwareProfile] = (),
        fork_workers: bool = True,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._row = row
        self._epoch = epoch
        self._checkpoint_url = checkpoint_url
        self._profiles = profiles
        self._fork_workers = fork_workers
        self._avoid: tuple[AvoidedNode, ...] = ()
        self._told: Directive | None = None
        self._changed = asyncio.Event()

    def want(self, row: DriveRow, avoid: tuple[AvoidedNode, ...]) -> None:
        """The newest row of the store, and the nodes that must not be used."""
        self._avoid = avoid
        if self._directive(row) != self._told:
            self._row = row
            self._changed.set()

    async def run(self) -> None:
        """Until the attempt's end is stored, or its supervisor is gone for good."""
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
                self._store.requeue, self._row.id, reason=EndReason.SUPERVISOR_LOST,
                message=f"the supervisor of attempt {self._row.attempt} is gone: {error}",
                epoch=self._epoch, now=time.time(),
            )  # fmt: skip

    async def _attach(self) -> SupervisorHandle:
        """Find the supervisor; start it if it was never heard of."""
        row = self._row
        found = await asyncio.to_thread(self._cluster.find_supervisor, row.id, row.attempt)
        if found is not None:
            return found
        if row.pulled_seq > 0:
            raise SupervisorGone("no actor of that name is in the cluster")
        config = await asyncio.to_thread(self._config)
        avoid = frozenset(node.node_id for node in self._avoid)
        return await asyncio.to_thread(self._cluster.start_supervisor, config, avoid_nodes=avoid)

    async def _follow(self, supervisor: SupervisorHandle) -> None:
        pulled = self._row.pulled_seq
        while True:
            try:
                news = await supervisor.pull(pulled, _PULL_WAIT_S, self._epoch)
            except SupervisorUnavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            await asyncio.to_thread(self._store.apply, self._row.id, news, epoch=self._epoch, now=time.time())
            pulled = news.seq
            if news.end is not None:
                await supervisor.release(self._epoch)
                await asyncio.to_thread(self._cluster.reap, self._row.id, self._row.attempt)
                return
            await asyncio.sleep(_LINGER_S)

    async def _steer(self, supervisor: SupervisorHandle) -> None:
        """Pass on what is desired, each time it changes."""
        while True:
            directive = self._directive(self._row)
            if directive != self._told:
                try:
                    await supervisor.direct(directive)
                except SupervisorGone:
                    return  # `_follow` finds out too, and says so
                except SupervisorUnavailable:
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._told = directive
            await self._changed.wait()
            self._changed.clear()

    def _directive(self, row: DriveRow) -> Directive:
        return Directive(
            epoch=self._epoch,
            granted=row.granted_workers,
            desired=row.desired,
            elasticity=row.spec.elasticity,
            parallelism=row.spec.parallelism,
            spec_version=row.spec_version,
            avoid=self._avoid,
        )

    def _config(self) -> SupervisorConfig:
        row = self._row
        root = (row.spec.checkpoint.url or self._checkpoint_url).rstrip("/")
        code_uri = None
        if row.spec.code.archive is not None:
            archive = self._store.get_code(row.spec.code.archive)
            if archive is None:
                raise LookupError(f"code archive {row.spec.code.archive} of job {row.id} is not in the store")
            code_uri = self._cluster.upload_code(archive)
        return SupervisorConfig(
            job_id=row.id,
            attempt=row.attempt,
            spec=row.spec,
            checkpoint_root=f"{root}/{row.id}",
            granted=row.granted_workers,
            epoch=self._epoch,
            spec_version=row.spec_version,
            code_uri=code_uri,
            goodput=row.status.goodput,
            snapshot_key=secrets.token_hex(16),
            profile=measured_profile(self._profiles, has_gpu=row.spec.worker.gpus > 0),
            fork_workers=self._fork_workers,
            avoid=self._avoid,
        )
