"""Jobs that move to another cluster: what a request needs of the store. Functions of an open transaction.

A move is a change of the spec's `worker.cluster`; the control loop follows it. Whether the cluster answers, has room
and reads the job's checkpoints is not known here (`control/moving.py`).
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from shoal_service.core.events.job import JobMoveRequested
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.nodes import Cordon
from shoal_service.store.access import audit
from shoal_service.store.clusters.tables import clusters
from shoal_service.store.edit import JobEdit
from shoal_service.store.errors import ClusterNotFound, MoveRefused
from shoal_service.store.records import JobRecord
from shoal_service.store.tables import jobs
from shoal_workers.contract.placing import ANY_CLUSTER


def require_cluster(connection: Connection, job: JobRecord, to: str) -> None:
    """Raises ClusterNotFound; MoveRefused: it is cordoned."""
    if to == ANY_CLUSTER:
        return
    row = connection.execute(select(clusters.c.cordon).where(clusters.c.name == to)).one_or_none()
    if row is None:
        raise ClusterNotFound(to)
    if row.cordon:
        raise MoveRefused(job.id, job.state, to, why_cordoned(to, Cordon.model_validate_json(row.cordon)))


def why_cordoned(cluster: str, cordon: Cordon) -> str:
    return f"the cluster is cordoned ({cordon.reason}). `shoal clusters uncordon {cluster}` opens it"


def note(edit: JobEdit, before: str, to: str, spec_version: int) -> None:
    """The event of the request."""
    query = select(jobs.c.cluster).where(jobs.c.num == edit.job.num)
    running_in = edit.connection.execute(query).scalar_one() if edit.job.state in ATTEMPT_STATES else ""
    edit.event(JobMoveRequested(from_=before, to=to, spec_version=spec_version, running_in=running_in, **audit.by()))
