"""One job's checkpoints in durable storage: commit, find, verify, delete. Imports no torch, reads no tensor.

    <checkpoint.url>/<job id>/          the root of a catalog
        step-000000000120-a1-g3/        a checkpoint, once COMMIT.json is in it
        began-a2.json                   which ones attempt 2 has found; of earlier attempts, only these count

Every call accesses the storage and may block, so the supervisor calls it from a thread. OSError means that the storage
does not answer. It never means "there is no checkpoint", since a job would then start again from step 0.
"""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence

from shoal_service.core.retention import best_names, choose_deletions
from shoal_service.supervisor.protocols import ANYBODY, Deleter, Found
from shoal_workers.checkpoint import beginnings
from shoal_workers.checkpoint.commit import checkpoint_names, commit_in, marker_in, marker_of
from shoal_workers.checkpoint.errors import AttemptFollowed, DamagedCheckpoint, StorageUnusable
from shoal_workers.checkpoint.integrity import check_lengths, verify_file
from shoal_workers.checkpoint.storage import Directory, join, open_job_directory
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName, CommitMarker
from shoal_workers.contract.worker_reports import SavedPart

_log = logging.getLogger(__name__)


class CheckpointCatalog:
    """Reads and changes the checkpoints of one job. It has no state: two catalogs of one root are equal.

    `root` includes the job's id; a plain path or an fsspec URL.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def url(self, name: CheckpointName) -> str:
        return join(self._root, str(name))

    def check_writable(self) -> None:
        """Writes, reads and deletes a small file. StorageUnusable names the reason if that fails, and the way out."""
        probe = f"write-probe-{uuid.uuid4().hex}"
        try:
            place = open_job_directory(self._root)
            place.create()
            place.write(probe, [probe.encode()])
            found = place.read(probe)
            place.remove(probe)
        except OSError as error:
            raise StorageUnusable(
                self._root, _in_one_line(error), _way_out(self._root), is_final=_is_final(error)
            ) from error
        if found != probe.encode():
            reason = f"{len(probe)} bytes were written, but {len(found)} different bytes were read back"
            raise StorageUnusable(self._root, reason, _way_out(self._root))

    def begin(self, attempt: int) -> None:
        """Notes which checkpoints are there when the attempt begins. An earlier attempt may still train in a cluster
        that was given up; what it commits from now on never counts. Repeating it is harmless."""
        root = open_job_directory(self._root)
        beginnings.begin(root, attempt, _listed_later(root))

    def commit(self, parts: Sequence[SavedPart], *, job_id: str, attempt: int, now: float) -> CommitMarker:
        """Makes a checkpoint of the parts of all ranks. Repeating it is harmless.

        DamagedCheckpoint if a reported part is not there, for example because the directory is not shared by all nodes.
        CommitConflict if another supervisor has committed it with other files. AttemptFollowed.
        """
        marker = marker_of(parts, job_id=job_id, attempt=attempt, now=now)
        place = self._open(CheckpointName(marker.step, marker.attempt, marker.generation))
        check_lengths(place, marker)
        later = beginnings.later_attempt(open_job_directory(self._root), attempt)
        if later is not None:
            raise AttemptFollowed(place.url, attempt, later)
        return commit_in(place, marker)

    def newest(
        self, *, before: CheckpointName | None = None, excluding: Collection[CheckpointName] = ()
    ) -> CheckpointName | None:
        """Finds the newest checkpoint with a valid marker; with `before`, the newest that is older than it."""
        for name in self._counting():
            if (before is None or name < before) and name not in excluding and self._marker(name) is not None:
                return name
        return None

    def search(self, excluding: Collection[CheckpointName] = ()) -> Found:
        damaged: list[tuple[CheckpointName, DamagedCheckpoint]] = []
        for name in self._counting():
            if name in excluding:
                continue
            place = self._open(name)
            try:
                marker_in(place)
            except DamagedCheckpoint as error:
                if MARKER_NAME in place.files():  # else it was never committed
                    damaged.append((name, error))
                continue
            return Found(name, tuple(damaged))
        return Found(None, tuple(damaged))

    def markers(self) -> list[tuple[CheckpointName, CommitMarker]]:
        """Every committed checkpoint, newest first, without those with a damaged marker."""
        found = ((name, self._marker(name)) for name in self._counting())
        return [(name, marker) for name, marker in found if marker is not None]

    def verify(self, name: CheckpointName, advanced: Callable[[int, int], None] = lambda read, of: None) -> None:
        """Reads all files. DamagedCheckpoint names the first file that differs from what was written. `advanced` is
        called with the bytes that are read so far, and with those of all files."""
        place = self._open(name)
        marker = marker_in(place)
        check_lengths(place, marker)
        num_read = 0

        def read(count: int) -> None:
            nonlocal num_read
            num_read += count
            advanced(num_read, marker.total_bytes)

        read(0)
        for file in marker.files:
            verify_file(place, file, read)

    def has_marker(self, name: CheckpointName) -> bool:
        """Whether there is a marker, also a damaged one."""
        try:
            return MARKER_NAME in self._open(name).files()
        except FileNotFoundError:
            return False

    def delete(self, name: CheckpointName) -> None:
        """Deletes a checkpoint, the marker first. No error if it does not exist."""
        place = self._open(name)
        place.remove(MARKER_NAME)
        place.remove_tree()
        _log.info("checkpoint.files_deleted", extra={"directory": place.url, "reason": "a user has deleted it"})

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
        """Deletes what `choose_deletions` chooses, and returns what was deleted.

        Failed deletions are tried again later. Nothing is deleted if a later attempt has begun.

        Args:
            best: steps whose checkpoints stay.
            by: is asked before each deletion.
        """
        if beginnings.later_attempt(open_job_directory(self._root), by.attempt) is not None:
            return []  # the later attempt goes on from one of them
        names = self._names()
        committed = [name for name, _ in self.markers()]
        uncommitted = [name for name in names if name not in committed]
        pinned = {*pinned, *best_names(committed, damaged, best)}
        gone = []
        for deletion in choose_deletions(
            committed, uncommitted, keep=keep, damaged=damaged, in_flight=in_flight, pinned=pinned
        ):
            if not by.may_delete(deletion.name):
                continue
            place = self._open(deletion.name)
            try:
                place.remove(MARKER_NAME)  # first: an interrupted deletion must not leave a valid marker
                place.remove_tree()
            except OSError:
                _log.warning("checkpoint.delete_failed", extra={"directory": place.url}, exc_info=True)
                continue
            _log.info("checkpoint.files_deleted", extra={"directory": place.url, "reason": deletion.reason})
            gone.append(deletion.name)
        return gone

    def remove_torn(self, *, in_flight: Collection[CheckpointName], by: Deleter = ANYBODY) -> list[CheckpointName]:
        """Deletes every directory without a marker, even a damaged one, and returns their names. Call it only after all
        writers have ended."""
        gone = []
        for name in self._names():
            place = self._open(name)
            if name not in in_flight and MARKER_NAME not in place.files() and by.may_delete(name):
                place.remove_tree()
                _log.info("checkpoint.files_deleted", extra={"directory": place.url, "reason": "never committed"})
                gone.append(name)
        return gone

    def forget_beginnings(self) -> None:
        """Forgets what `begin` has noted. Called once the job's checkpoints are deleted."""
        beginnings.forget_beginnings(open_job_directory(self._root))

    def _open(self, name: CheckpointName) -> Directory:
        return open_job_directory(self._root).child(str(name))

    def _names(self) -> list[CheckpointName]:
        return checkpoint_names(open_job_directory(self._root))

    def _counting(self) -> list[CheckpointName]:
        """Leaves out the checkpoints that an earlier attempt has committed after a later one had begun."""
        root = open_job_directory(self._root)
        newest = beginnings.newest_beginning(root)
        return [name for name in checkpoint_names(root) if newest.counts(name)]

    def _marker(self, name: CheckpointName) -> CommitMarker | None:
        try:
            return marker_in(self._open(name))
        except DamagedCheckpoint:
            return None


def _listed_later(root: Directory) -> Iterator[CheckpointName]:
    """Lists the directories when it is iterated."""
    yield from checkpoint_names(root)


def _is_final(error: OSError) -> bool:
    """Whether trying again cannot help: the URL, its rights or an installed library must change. Everything else
    (time-outs, refused connections, I/O errors, a stale mount) may pass."""
    wrong = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
    is_unknown = isinstance(error.__cause__, (ValueError, ImportError))
    return is_unknown or isinstance(error, wrong) or error.errno == errno.EROFS


def _in_one_line(error: OSError) -> str:
    reason = " ".join(str(error).split())
    return reason if type(error) is OSError else f"{type(error).__name__}: {reason}"


def _way_out(root: str) -> str:
    if "://" in root and not root.startswith("file://"):
        return (
            "Check that the bucket exists, that the credentials in the environment of every node may read, write and "
            "delete there, and that the protocol's library is installed (for s3:// the extra: shoal[s3])."
        )
    return (
        "Use a directory that the user who runs the cluster may write, and that every node reaches under the same path."
    )
