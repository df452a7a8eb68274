"""ReachableStorage: in which clusters the checkpoints of a job can be read, as their gateways say.

    control loop  -- why_not(cluster, job) -->  the last answer, which is asked for in the background if it is old

The storage of a cluster is not this server's: a directory of the same name may be another one there. Used on the loop
of the control loop; a gateway that does not answer holds up nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from shoal_service.clock import Clock
from shoal_service.cluster.errors import ClusterError, ClusterUnreachable
from shoal_service.control.clusters.errands import Errands
from shoal_service.control.protocols import Clusters
from shoal_service.store import checkpoint_rows
from shoal_service.store.driving import DriveRow
from shoal_service.store.errors import JobNotFound
from shoal_service.store.store import Store
from shoal_service.supervisor.config import checkpoint_root
from shoal_service.views import CheckpointState
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.spec import JobSpec

_GOOD_S = 300.0
_BAD_S = 15.0
"""An answer is asked for again after this time; the old one counts until then."""
_KEPT_S = 3600.0
_AT_ONCE = 4
"""Questions to one cluster."""
_Key: TypeAlias = tuple[str, str, int, bool]
"""Cluster, job, attempt (the next one may have saved something), and whether the attempt will save."""


@dataclass(frozen=True, slots=True)
class _Answer:
    why_not: str
    mono: float

    def is_old(self, mono: float) -> bool:
        return mono - self.mono >= (_BAD_S if self.why_not else _GOOD_S)


class ReachableStorage:
    def __init__(self, store: Store, clusters: Clusters, clock: Clock, default_url: str) -> None:
        """`default_url`: the checkpoint directory of jobs without a `checkpoint.url`."""
        self._store = store
        self._clusters = clusters
        self._clock = clock
        self._default_url = default_url
        self._errands = Errands()
        self._answers: dict[_Key, _Answer] = {}
        self._asked: dict[str, int] = {}
        """Open questions, by cluster."""

    def why_not(self, cluster: str, row: DriveRow, *, saves: bool = False) -> str | None:
        """Why the job cannot go on there from what it has saved; empty: it can; None: not known yet.

        Args:
            saves: its attempt saves before, so its directory must be there also if it has no checkpoint yet.
        """
        if not needs_storage(row):
            return ""
        key, mono = (cluster, row.id, row.attempt, saves), self._clock.monotonic()
        known = self._answers.get(key)
        num_open = self._asked.get(cluster, 0)
        if (
            (known is None or known.is_old(mono))
            and num_open < _AT_ONCE
            and self._errands.begin(cluster, f"storage of {row.id} {saves}", lambda: self._ask(key, row.spec))
        ):
            self._asked[cluster] = num_open + 1
        return None if known is None else known.why_not

    def look_now(self, cluster: str, job_id: str, spec: JobSpec, *, saves: bool) -> str:
        """The same, asked now; blocks. Raises ClusterUnreachable, JobNotFound."""
        root, name = self._saved(job_id, spec)
        return self._clusters.of(cluster).sees_storage(root, name) if name or saves else ""

    def drop(self) -> None:
        """The lease is lost: nothing is asked any more."""
        self._errands.drop()
        self._asked.clear()

    async def _ask(self, key: _Key, spec: JobSpec) -> None:
        cluster, job_id, _, saves = key
        try:
            why_not = await asyncio.to_thread(partial(self.look_now, cluster, job_id, spec, saves=saves))
        except (JobNotFound, ClusterUnreachable):
            return
        except ClusterError as error:  # a gateway of a release that does not know the question
            why_not = str(error)
        finally:
            self._asked[cluster] = max(0, self._asked.get(cluster, 0) - 1)
        mono = self._clock.monotonic()
        self._answers = {k: one for k, one in self._answers.items() if mono - one.mono < _KEPT_S}
        self._answers[key] = _Answer(why_not, mono)

    def _saved(self, job_id: str, spec: JobSpec) -> tuple[str, str]:
        """URL of the job's directory, and name of the checkpoint from which it would go on; empty: it has none."""
        committed = [
            one
            for one in self._store.reading(checkpoint_rows.read_checkpoints)(job_id)
            if one.state is CheckpointState.COMMITTED
        ]
        if committed:
            newest = max(CheckpointName(one.step, one.attempt, one.generation) for one in committed)
            return checkpoint_root(spec, self._default_url, job_id), str(newest)
        origin = spec.continue_from
        if origin is not None and origin.checkpoint:
            root, _, name = origin.checkpoint.rstrip("/").rpartition("/")
            return root, name
        return checkpoint_root(spec, self._default_url, job_id), ""


def needs_storage(row: DriveRow) -> bool:
    """The job may go on from a checkpoint."""
    return row.attempt > 0 or row.spec.continue_from is not None
