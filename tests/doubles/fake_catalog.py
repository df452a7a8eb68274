"""FakeCatalog: the checkpoints of one job, in memory."""

from collections.abc import Collection, Sequence
from functools import partial

from doubles.event_loop import Hangs
from shoal_service.core.retention import best_names, choose_deletions
from shoal_service.supervisor.protocols import ANYBODY, Deleter, Found
from shoal_workers.checkpoint.commit import marker_of
from shoal_workers.checkpoint.errors import AttemptFollowed, CommitConflict, DamagedCheckpoint, StorageUnusable
from shoal_workers.contract.marker import CheckpointName, CommitMarker
from shoal_workers.contract.worker_reports import SavedPart


class FakeCatalog:
    """A `protocols.Catalog`."""

    def __init__(self, root: str = "/checkpoints/j1") -> None:
        self._root = root
        self.files: dict[CheckpointName, dict[str, int]] = {}
        """Lengths by file name, for each directory. A directory is known once a part was written into it."""
        self.markers: dict[CheckpointName, CommitMarker] = {}
        self.damaged: set[CheckpointName] = set()
        """Those whose marker is damaged."""
        self.begun: dict[int, frozenset[CheckpointName]] = {}
        """By attempt: what it has found."""
        self.is_unusable = False
        self.is_away = False
        self.hangs = False
        """Commits do not return."""
        self.hanging: list[Hangs] = []
        self.trusts_parts = False
        """Take every part for written, as tests of the executor need it."""

    def url(self, name: CheckpointName) -> str:
        return f"{self._root}/{name}"

    def check_writable(self) -> None:
        if self.is_unusable:
            raise StorageUnusable(self._root, "permission denied", "Use another directory.")

    def begin(self, attempt: int) -> None:
        self._require_storage()
        self.begun.setdefault(attempt, frozenset(name for name in {*self.markers, *self.damaged} if self._counts(name)))

    def commit(self, parts: Sequence[SavedPart], *, job_id: str, attempt: int, now: float) -> CommitMarker:
        self._require_storage()
        if self.hangs:
            self.hanging.append(Hangs(partial(self.commit, parts, job_id=job_id, attempt=attempt, now=now)))
            raise self.hanging[-1]
        marker = marker_of(parts, job_id=job_id, attempt=attempt, now=now)
        name = CheckpointName(marker.step, marker.attempt, marker.generation)
        if (later := max(self.begun, default=0)) > attempt:
            raise AttemptFollowed(self.url(name), attempt, later)
        if name in self.markers:
            if self.markers[name].files != marker.files:
                raise CommitConflict(self.url(name))
            return self.markers[name]
        if self.trusts_parts:
            self.files[name] = {file.name: file.bytes for file in marker.files}
        for file in marker.files:
            if self.files.get(name, {}).get(file.name) != file.bytes:
                raise DamagedCheckpoint(self.url(name), file.name, "is missing or has another length")
        self.markers[name] = marker
        return marker

    def search(self, excluding: Collection[CheckpointName] = ()) -> Found:
        self._require_storage()
        fitting = (n for n in self.markers if self._counts(n) and n not in excluding and n not in self.damaged)
        newest = max(fitting, default=None)
        newer = [n for n in self.damaged if self._counts(n) and n not in excluding and (newest is None or n > newest)]
        errors = [DamagedCheckpoint(self.url(n), "COMMIT.json", "is damaged") for n in newer]
        there = max((n for n in {*self.markers, *self.damaged} if self._counts(n)), default=None)
        return Found(newest, tuple(zip(newer, errors, strict=True)), there)

    def retain(
        self,
        keep: int,
        *,
        damaged: Collection[CheckpointName],
        in_flight: Collection[CheckpointName],
        pinned: Collection[CheckpointName] = (),
        best: Collection[int] = (),
        by: Deleter = ANYBODY,
    ) -> list[CheckpointName]:
        self._require_storage()
        if max(self.begun, default=0) > by.attempt:
            return []
        committed = [name for name in self.markers if self._counts(name)]
        torn = [name for name in self.files if name not in committed]
        pinned = {*pinned, *best_names(committed, damaged, best)}
        deletions = choose_deletions(committed, torn, keep=keep, damaged=damaged, in_flight=in_flight, pinned=pinned)
        return self._delete([deletion.name for deletion in deletions if by.may_delete(deletion.name)])

    def remove_torn(self, *, in_flight: Collection[CheckpointName], by: Deleter = ANYBODY) -> list[CheckpointName]:
        self._require_storage()
        torn = [n for n in self.files if n not in self.markers and n not in in_flight]
        return self._delete([n for n in torn if by.may_delete(n)])

    def _counts(self, name: CheckpointName) -> bool:
        newest = max(self.begun, default=0)
        return name.attempt >= newest or name in self.begun[newest]

    def _delete(self, names: list[CheckpointName]) -> list[CheckpointName]:
        for name in names:
            self.files.pop(name, None)
            self.markers.pop(name, None)
        return names

    def _require_storage(self) -> None:
        if self.is_away:
            raise OSError("the storage does not answer")
