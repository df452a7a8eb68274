"""Leftovers: ends actors of attempts that are over.

A server that is killed between the store of an attempt's end and the release of its supervisor leaves that supervisor
in the cluster. No driver follows an attempt that is over, so nobody else would end it. Called by the control loop with
each reading of the cluster; idempotent. The cluster may also have actors of other control planes: their jobs are not in
this store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from shoal_service.clusters.snapshot import AttemptKey
from shoal_service.control.protocols import Cluster
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.store.errors import StoreError
from shoal_service.store.store import Store

_log = logging.getLogger(__name__)


class Leftovers:
    def __init__(self, store: Store, cluster: Cluster) -> None:
        self._store = store
        self._cluster = cluster
        self._kept: set[AttemptKey] = set()
        """Attempts of jobs that this store does not have, or cannot read."""

    async def end(self, found: Collection[AttemptKey], driven: Collection[AttemptKey]) -> None:
        """Ends those of the `found` attempts that are over. Raises ClusterUnreachable.

        Args:
            found: attempts with actors in the cluster.
            driven: attempts with a driver, which ends their actors itself.
        """
        for key in sorted({*found} - {*driven} - self._kept):
            await asyncio.to_thread(self._look, key)

    def _look(self, key: AttemptKey) -> None:
        job_id, attempt = key
        try:
            status = self._store.get_job(job_id).status
        except StoreError:
            self._kept.add(key)
            return
        if attempt < status.attempt or (attempt == status.attempt and status.state not in ATTEMPT_STATES):
            number = self._cluster.reap(job_id, attempt)
            _log.warning("attempt.leftover_ended", extra={"job": job_id, "attempt": attempt, "actors": number})
