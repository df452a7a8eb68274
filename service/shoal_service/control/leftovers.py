"""Leftovers: ends actors of attempts that are over.

A server that is killed between the store of an attempt's end and the release of its supervisor leaves that supervisor
in the cluster. No driver follows an attempt that is over, so nothing else would end it. A cluster that was lost and
returns still has the attempts that were given up. Called by the control loop with each reading of a cluster;
idempotent. The cluster may also have actors of other control planes: their jobs are not in this store.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from shoal_service.clusters.snapshot import AttemptKey
from shoal_service.control.protocols import Clusters
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.store.errors import StoreError
from shoal_service.store.store import Store

_log = logging.getLogger(__name__)


class Leftovers:
    def __init__(self, store: Store, clusters: Clusters) -> None:
        self._store = store
        self._clusters = clusters
        self._kept: set[AttemptKey] = set()
        """Attempts of jobs that this store does not have, or cannot read."""

    def of(self, found: Collection[AttemptKey], driven: Collection[AttemptKey]) -> list[AttemptKey]:
        """Selects the attempts of `found` that may be over.

        Args:
            found: attempts with actors in a cluster.
            driven: attempts with a driver, which ends their actors itself.
        """
        return sorted({*found} - {*driven} - self._kept)

    def end(self, cluster: str, keys: Sequence[AttemptKey]) -> None:
        """Ends the attempts that are over, in this cluster; blocks. Raises ClusterUnreachable."""
        for key in keys:
            self._look(cluster, key)

    def _look(self, cluster: str, key: AttemptKey) -> None:
        job_id, attempt = key
        try:
            status = self._store.get_job(job_id).status
        except StoreError:
            self._kept.add(key)
            return
        if attempt < status.attempt or (attempt == status.attempt and status.state not in ATTEMPT_STATES):
            number = self._clusters.of(cluster).reap(job_id, attempt)
            _log.warning(
                "attempt.leftover_ended",
                extra={"cluster": cluster, "job": job_id, "attempt": attempt, "actors": number},
            )
