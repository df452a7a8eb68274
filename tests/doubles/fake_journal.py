"""FakeJournal: the journal of one supervisor, in a dict that its successor also receives."""

from dataclasses import dataclass, field

from shoal_service.supervisor.journal import JournalEntry, RecoveredState, parse_entry


class Replaced(BaseException):
    """A later supervisor has started. The real journal ends the process, so no handler of errors sees this."""


@dataclass
class JournalStorage:
    """What outlives the supervisor."""

    entries: dict[int, str] = field(default_factory=dict)
    """The newest entry of each life."""
    starts: list[float] = field(default_factory=list)
    """When each life began."""
    epoch: int = 0
    num_lost: int = 0
    """Records that cannot be read."""

    @property
    def entry(self) -> str | None:
        """The one that the next supervisor reads."""
        return self.entries[max(self.entries)] if self.entries else None


class FakeJournal:
    """A `protocols.Journal`."""

    def __init__(self, storage: JournalStorage, log: list[str] | None = None) -> None:
        self._storage = storage
        self._life = 0
        self._log = log if log is not None else []
        self.written: list[JournalEntry] = []
        self.is_away = False
        """The head cannot be reached: nothing is written."""

    def read(self) -> JournalEntry | None:
        raw = self._storage.entry
        return None if raw is None else parse_entry(raw)

    def begin(self, now: float) -> RecoveredState:
        self._storage.starts = [*self._storage.starts, now]
        self._life = len(self._storage.starts)
        return RecoveredState(
            self._life, list(self._storage.starts), self.read(), self._storage.epoch, self._storage.num_lost
        )

    @property
    def life(self) -> int:
        return self._life

    def require_current(self) -> None:
        if len(self._storage.starts) != self._life:
            raise Replaced

    def obey(self, epoch: int) -> None:
        self._storage.epoch = epoch

    def write(self, entry: JournalEntry, *, wait: bool = True) -> None:
        self._log.append("journal")
        self.written.append(entry)
        if not self.is_away:
            self._storage.entries[self._life] = entry.model_dump_json()

    def delete(self) -> None:
        self._storage.entries = {}
        self._storage.starts = []
        self._storage.epoch = 0
