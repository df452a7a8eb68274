"""The console of `shoal serve`: one log event for each new job, incident and end of a job that this server stores.

    committing threads  -- job id -->  a set  -->  one thread: which of these jobs have new events?  -->  log

Made by `serve.py`. It only reads. A job that changes often costs one query in half a second, together with all others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal_service.core.events import (
    IncidentClosed,
    IncidentOpened,
    JobCreated,
    JobPreempted,
    JobQuarantined,
    JobStateChanged,
    NodeSuspected,
    Severity,
)
from shoal_service.store import Store, histories
from shoal_service.views import EventView
from shoal_workers.contract import JobState

_log = logging.getLogger(__name__)
_GATHER_S = 0.5
_FIRST = 100
"""Newest events that are considered of a job that is seen for the first time."""
_LEVELS = {
    Severity.INFO: logging.INFO,
    Severity.SUCCESS: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.ERROR: logging.ERROR,
}
_TYPES = frozenset(
    event.type for event in (JobCreated, JobQuarantined, JobPreempted, IncidentOpened, IncidentClosed, NodeSuspected)
)
_STATES = frozenset({JobState.QUEUED, JobState.PAUSED, *(state for state in JobState if state.ended)})
_BEGINS = frozenset({JobState.QUEUED, JobState.STARTING})


@dataclass(slots=True)
class _Seen:
    name: str
    seq: int


class JobConsole:
    """`start` once, `close` before the store is closed."""

    def __init__(
        self, store: Store, *, since: float, log: Callable[[int, str, Mapping[str, object]], None] | None = None
    ):
        """`since`: events before this wall-clock time are not reported."""
        self._store = store
        self._since = since
        self._report = log or _write
        self._seen: dict[str, _Seen] = {}
        self._changed: set[str] = set()
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._subscription = store.subscribe(self._note)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Report what has happened until now, and stop."""
        self._subscription.close()
        self._stop.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        self.report_changed()

    def report_changed(self) -> None:
        """Report the new events of the jobs that have changed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
        for job_id, seq in self._store.reading(histories.read_event_numbers)(changed).items():
            seen = self._seen.get(job_id)
            if seen is not None and seen.seq >= seq:
                continue
            tail = _FIRST if seen is None else None
            if seen is None:
                seen = self._seen[job_id] = _Seen(self._store.get_job(job_id).name, 0)
            events = self._store.reading(histories.read_events)(job_id, after=seen.seq, tail=tail)
            seen.seq = max((event.seq for event in events), default=seen.seq)
            for event in events:
                if event.at >= self._since and is_reported(event):
                    fields = {"job": job_id, "job_name": seen.name, "text": event.message}
                    self._report(_LEVELS[event.severity], event.type, fields)
            if events and _has_ended(events[-1]):
                del self._seen[job_id]

    def _note(self, job_id: str) -> None:
        with self._lock:
            self._changed.add(job_id)
        self._woken.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.wait()
            self._stop.wait(_GATHER_S)
            self._woken.clear()
            try:
                self.report_changed()
            except Exception:  # the boundary of this thread: the database is away, or closed
                _log.exception("console.failed")


def is_reported(event: EventView) -> bool:
    """Return True for new jobs, incidents, and the states in which a job begins to train, stops or ends. Pure."""
    if event.type != JobStateChanged.type:
        return event.type in _TYPES
    before, to = event.data.get("from"), event.data.get("to")
    return to in _STATES or (to == JobState.RUNNING and before in _BEGINS)


def _has_ended(event: EventView) -> bool:
    return event.type == JobStateChanged.type and JobState(event.data["to"]).ended


def _write(level: int, event: str, fields: Mapping[str, object]) -> None:
    _log.log(level, event, extra=fields)
