"""FakeJournal: the journal of one supervisor, in a dict that its successor also receives."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_service.supervisor.journal import JournalEntry


class Replaced(Exception):
    """A later supervisor has started. The real journal ends the process."""


@dataclass
class JournalStorage:
    """What outlives the supervisor."""

    entry: str | None = None
    starts: list[float] = field(default_factory=list)


class FakeJournal:
    """A `protocols.Journal`."""

    def __init__(self, storage: JournalStorage, log: list[str] | None = None) -> None:
        self._storage = storage
        self._started_at = 0.0
        self._log = log if log is not None else []
        self.written: list[JournalEntry] = []

    def read(self) -> JournalEntry | None:
        raw = self._storage.entry
        return None if raw is None else JournalEntry.model_validate_json(raw)

    def record_start(self, now: float) -> list[float]:
        self._storage.starts = [*self._storage.starts, now]
        self._started_at = now
        return list(self._storage.starts)

    def require_current(self) -> None:
        if not self._storage.starts or self._storage.starts[-1] != self._started_at:
            raise Replaced

    def write(self, entry: JournalEntry, *, wait: bool = True) -> None:
        self._log.append("journal")
        self.written.append(entry)
        self._storage.entry = entry.model_dump_json()

    def delete(self) -> None:
        self._storage.entry = None
        self._storage.starts = []
