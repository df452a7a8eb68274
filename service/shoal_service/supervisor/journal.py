"""Journal: what a supervisor must still know after its own death, kept in the cluster's key-value store (GCS).

It lives and dies with the cluster, which is right: without the cluster there is no shard to re-attach to, and the job
resumes from its durable checkpoint in a new attempt. Written before the commands that follow from it are performed.

While the Ray head is away nothing can be written, and training must not stop for that: `write` waits a moment, then
lets the commands go ahead, and the newest entry is written when the head is back. Only a supervisor that dies in that
very time comes back with an older entry (and not before the head, which restarts it). What its predecessor did in the
meantime is then found out the hard way: workers of a generation that it does not know answer `stale`, or are stuck
and replaced, so a group is formed once more than needed, from a snapshot or checkpoint; events not pulled are lost.

The head is also who tells a supervisor that it has a successor: one whose node was cut off is started again elsewhere,
and cannot know. `require_current` is its fence, before anything that outlives the attempt is written.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from pydantic import Field, TypeAdapter

from shoal_service.cluster import gcs
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.reports import AttemptEnd, PendingEvent, SuspectedNode
from shoal_service.supervisor.config import Directive
from shoal_service.views import CheckpointView, IncidentView
from shoal_workers.contract.base import Frozen

_log = logging.getLogger(__name__)
_NAMESPACE = b"shoal-journal"
_PATIENCE_S = 0.25
"""The head answers within a millisecond; longer than this, it is away."""
_RETRY_S = 0.2
_LIVES = TypeAdapter(list[float])
_MAX_LIVES = 100


class Unacknowledged(Frozen):
    """An item that the control plane has not acknowledged yet."""

    seq: int
    item: PendingEvent | IncidentView | CheckpointView | SuspectedNode


class JournalEntry(Frozen):
    state: Attempt
    seq: int
    unacknowledged: tuple[Unacknowledged, ...] = ()
    end: AttemptEnd | None = None
    directive: Directive | None = None
    shard_seqs: dict[int, int] = Field(default_factory=dict)


class Journal:
    """One job attempt's entry. `write` is called on the executor's loop only."""

    def __init__(self, job_id: str, attempt: int) -> None:
        self._key = f"{job_id}/{attempt}".encode()
        self._lives_key = f"{job_id}/{attempt}/lives".encode()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._entry: bytes | None = None
        """The newest one that is not written yet."""
        self._is_behind = False
        self._birth = 0.0
        self._writer: threading.Thread | None = None

    def read(self) -> JournalEntry | None:
        """Blocks until the head answers."""
        raw = _insist(self._key)
        return None if raw is None else JournalEntry.model_validate_json(raw)

    def note_birth(self, now: float) -> list[float]:
        """One more life of this supervisor begins: when each of them did, this one included. Blocks until the head
        answers."""
        raw = _insist(self._lives_key)
        lives = [*(_LIVES.validate_json(raw) if raw is not None else ()), now][-_MAX_LIVES:]
        self._put(self._lives_key, _LIVES.dump_json(lives))
        self._birth = now
        return lives

    def require_current(self) -> None:
        """Returns once the head has said that no later life of this supervisor has begun; blocks while it is away.

        A worker that has a successor, or whose attempt was cleared away, ends here and now: whatever it did next would
        be done twice.
        """
        raw = _insist(self._lives_key)
        if raw is None or _LIVES.validate_json(raw)[-1] != self._birth:
            _log.error("this supervisor has been replaced; it ends")
            os._exit(1)

    def write(self, entry: JournalEntry, *, wait: bool = True) -> None:
        """Returns when it is written, within a millisecond or so; or at once, or nearly, while the head is away, or if
        nothing is to follow from it (`wait` False)."""
        with self._changed:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_forever, name="journal", daemon=True)
                self._writer.start()
            self._entry = entry.model_dump_json().encode()
            self._changed.notify_all()
            if self._is_behind or not wait:
                return
            if not self._changed.wait_for(lambda: self._entry is None, timeout=_PATIENCE_S):
                self._is_behind = True
                _log.warning("the journal cannot be written: the Ray head is away")

    def delete(self) -> None:
        for key in (self._key, self._lives_key):
            try:
                gcs.kv_delete(key, _NAMESPACE)
            except gcs.GcsUnavailable as error:
                _log.warning("a journal is left behind", extra={"error": str(error)})

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._entry is not None)
                entry = self._entry
            assert entry is not None
            if self._is_behind:
                self.require_current()  # whoever was cut off must not overwrite what its successor wrote
            self._put(self._key, entry)
            with self._changed:
                if self._entry is entry:
                    self._entry = None
                    self._is_behind = False
                    self._changed.notify_all()

    @staticmethod
    def _put(key: bytes, value: bytes) -> None:
        while True:
            try:
                gcs.kv_put(key, value, _NAMESPACE)
                return
            except gcs.GcsUnavailable:
                time.sleep(_RETRY_S)  # the client has waited for its own deadline; there is nothing to be told by


def _insist(key: bytes) -> bytes | None:
    while True:
        try:
            return gcs.kv_get(key, _NAMESPACE)
        except gcs.GcsUnavailable:
            time.sleep(_RETRY_S)
