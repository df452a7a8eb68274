"""GcsJournal: what a supervisor must still know after its own death, in the cluster's key-value store (GCS).

The journal exists as long as the cluster. Without the cluster there is no worker to reattach to, and the job resumes
from its durable checkpoint in a new attempt. An entry is written before the commands that follow from it are performed.

While the Ray head is away nothing can be written, and training must not stop for that: `write` waits a moment, then
lets the commands go ahead, and the newest entry is written when the head is back. A supervisor that dies during that
time restarts with an older entry (after the head, which restarts it). What its predecessor did in the meantime is then
found out from the workers: those of a generation that the entry does not contain answer `stale`, or are stuck and
replaced. So one group more than necessary is formed, from a snapshot or a checkpoint, and events that were not pulled
are lost.

The head also decides which supervisor of an attempt is the current one. A supervisor whose node was cut off is started
again on another node and cannot know of it, so `require_current` is its fence before every write that outlives the
attempt.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from pydantic import TypeAdapter

from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import PendingEvent, SuspectedNode
from shoal_service.supervisor.config import Directive
from shoal_service.views import CheckpointView, IncidentView
from shoal_workers.contract.base import Frozen

JOURNAL_NAMESPACE = b"shoal-journal"
_log = logging.getLogger(__name__)
_WRITE_WAIT_S = 0.25
"""The head answers within a millisecond; after this time it counts as away."""
_RETRY_S = 0.2
_STARTS = TypeAdapter(list[float])
_MAX_STARTS = 100


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


class KeyValueStore(Protocol):
    """One namespace of the head's key-value store; `cluster.gcs.GcsKeyValueStore`. Every call raises GcsUnavailable."""

    def get(self, key: bytes) -> bytes | None: ...

    def put(self, key: bytes, value: bytes) -> None: ...

    def delete(self, key: bytes) -> None: ...


def _exit() -> None:
    os._exit(1)


class GcsJournal:
    """The real `protocols.Journal`: one entry per job attempt. `write` is called on the executor's loop only."""

    def __init__(
        self, store: KeyValueStore, job_id: str, attempt: int, *, on_replaced: Callable[[], None] = _exit
    ) -> None:
        """`on_replaced` must not return: it ends this process, which has a successor."""
        self._store = store
        self._on_replaced = on_replaced
        self._key = f"{job_id}/{attempt}".encode()
        self._starts_key = f"{job_id}/{attempt}/starts".encode()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._entry: bytes | None = None
        """The newest one that is not written yet."""
        self._is_behind = False
        self._started_at = 0.0
        self._writer: threading.Thread | None = None

    def read(self) -> JournalEntry | None:
        raw = self._get(self._key)
        return None if raw is None else JournalEntry.model_validate_json(raw)

    def record_start(self, now: float) -> list[float]:
        raw = self._get(self._starts_key)
        starts = [*(_STARTS.validate_json(raw) if raw is not None else ()), now][-_MAX_STARTS:]
        self._put(self._starts_key, _STARTS.dump_json(starts))
        self._started_at = now
        return starts

    def require_current(self) -> None:
        """Ends this process if it has a successor, or if its attempt was removed: the successor would do everything a
        second time that this one did next."""
        raw = self._get(self._starts_key)
        if raw is None or _STARTS.validate_json(raw)[-1] != self._started_at:
            _log.error("supervisor.replaced")
            self._on_replaced()

    def write(self, entry: JournalEntry, *, wait: bool = True) -> None:
        """Takes about a millisecond; while the head is away, `_WRITE_WAIT_S` the first time and nothing afterwards."""
        with self._changed:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_forever, name="journal", daemon=True)
                self._writer.start()
            self._entry = entry.model_dump_json().encode()
            self._changed.notify_all()
            if self._is_behind or not wait:
                return
            if not self._changed.wait_for(lambda: self._entry is None, timeout=_WRITE_WAIT_S):
                self._is_behind = True
                _log.warning("journal.behind", extra={"reason": "the Ray head does not answer"})

    def delete(self) -> None:
        for key in (self._key, self._starts_key):
            try:
                self._store.delete(key)
            except GcsUnavailable as error:
                _log.warning("journal.delete_failed", extra={"error": str(error)})

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._entry is not None)
                entry = self._entry
            assert entry is not None
            self._put(self._key, entry, is_fenced=True)
            with self._changed:
                if self._entry is entry:
                    self._entry = None
                    self._is_behind = False
                    self._changed.notify_all()

    def _get(self, key: bytes) -> bytes | None:
        while True:
            try:
                return self._store.get(key)
            except GcsUnavailable:
                time.sleep(_RETRY_S)  # the head does not announce its return

    def _put(self, key: bytes, value: bytes, *, is_fenced: bool = False) -> None:
        """`is_fenced`: a supervisor that was cut off must not overwrite its successor's entry."""
        was_away = self._is_behind
        while True:
            if is_fenced and was_away:
                self.require_current()
            try:
                self._store.put(key, value)
                return
            except GcsUnavailable:
                was_away = True
                time.sleep(_RETRY_S)
