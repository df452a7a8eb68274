"""Journal: what a supervisor must still know after its own death, kept in the cluster's key-value store (GCS).

It lives and dies with the cluster, which is right: without the cluster there is no shard to re-attach to, and the job
resumes from its durable checkpoint in a new attempt. Written before the commands that follow from it are performed.
"""

from __future__ import annotations

from pydantic import Field
from ray.experimental import internal_kv

from shoal_service.core.attempt.state import Attempt
from shoal_service.supervisor.config import Directive
from shoal_service.views import AttemptEnd, CheckpointView, IncidentView, PendingEvent
from shoal_workers.contract.base import Frozen

_NAMESPACE = b"shoal-journal"


class Untold(Frozen):
    """An item that the control plane has not acknowledged yet."""

    seq: int
    item: PendingEvent | IncidentView | CheckpointView


class JournalEntry(Frozen):
    state: Attempt
    seq: int
    untold: tuple[Untold, ...] = ()
    end: AttemptEnd | None = None
    directive: Directive | None = None
    shard_seqs: dict[int, int] = Field(default_factory=dict)


class Journal:
    """One job attempt's entry. Blocking calls of about a millisecond."""

    def __init__(self, job_id: str, attempt: int) -> None:
        self._key = f"{job_id}/{attempt}".encode()

    def read(self) -> JournalEntry | None:
        raw = internal_kv._internal_kv_get(self._key, namespace=_NAMESPACE)
        return None if raw is None else JournalEntry.model_validate_json(raw)

    def write(self, entry: JournalEntry) -> None:
        internal_kv._internal_kv_put(self._key, entry.model_dump_json().encode(), overwrite=True, namespace=_NAMESPACE)

    def delete(self) -> None:
        internal_kv._internal_kv_del(self._key, namespace=_NAMESPACE)
