"""A job's checkpoints in durable storage: found, committed, verified, deleted. Imports no torch, reads no tensor.

    CheckpointCoordinator   the executor's side: calls that block run in threads, their results become events of the
                            attempt machine, and a storage that hangs holds up nothing. It decides nothing
    CheckpointCatalog       the calls themselves, which block; also used for jobs that have no supervisor

    <checkpoint.url>/<job id>/          the root of a catalog
        step-000000000120-a1-g3/        a checkpoint, once COMMIT.json is in it
        began-a2.json                   which ones attempt 2 has found; of earlier attempts, only these count

OSError means that the storage does not answer. It never means "there is no checkpoint", since a job would then start
again from step 0. A call that the storage does not answer within timeouts.commit_s is given up, and until it returns
each commit fails at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from shoal_service.core.attempt.checkpoints import describe_missing
from shoal_service.core.attempt.messages import (
    CheckpointCommitted,
    CheckpointFound,
    CommitFailed,
    Event,
    FindCheckpoint,
    StorageAway,
)
from shoal_service.core.attempt.messages import StorageUnusable as StorageIsUnusable
from shoal_service.core.attempt.state import Attempt
from shoal_service.core.events import CheckpointRetentionFailed
from shoal_service.core.retention import best_names, choose_deletions
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.protocols import ANYBODY, Deleter, Found, World
from shoal_service.supervisor.reporting.reporter import Reporter
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.checkpoint import beginnings
from shoal_workers.checkpoint.commit import (
    check_lengths,
    checkpoint_names,
    commit_in,
    marker_in,
    marker_of,
    verify_file,
)
from shoal_workers.checkpoint.errors import AttemptFollowed, DamagedCheckpoint, StorageUnusable
from shoal_workers.checkpoint.storage import Directory, join, open_job_directory
from shoal_workers.contract import MARKER_NAME, CheckpointName, CommitMarker, SavedPart

T = TypeVar("T")
_log = logging.getLogger(__name__)
_REMOVE_S = 5.0


class StorageHangs(OSError):
    """The storage neither answered nor failed within the time."""


class CheckpointCoordinator:
    """Commits one checkpoint at a time, in order, and deletes old ones after each."""

    def __init__(
        self, config: SupervisorConfig, world: World, reporter: Reporter, post: Callable[[Event], None]
    ) -> None:
        self._catalog = world.catalog
        self._require_current = world.journal.require_current
        self._clock = world.clock
        self._config = config
        self._reporter = reporter
        self._post = post
        self._is_checked = False
        self._one_at_a_time = asyncio.Lock()
        self._committed: set[str] = set()
        """Names that are committed. The state that is passed with a later one may still have them as under way."""
        self._hanging: asyncio.Future[Any] | None = None
        """The call that was given up. It is done once the storage has answered it."""

    async def find(self, command: FindCheckpoint) -> None:
        try:
            search = await asyncio.to_thread(self._find, command)
        except OSError as error:
            self._post(StorageAway(f"{type(error).__name__}: {error}"))
        except StorageUnusable as error:
            self._post(StorageIsUnusable(str(error)) if error.is_final else StorageAway(error.reason))
        except Exception as error:
            self._post(StorageIsUnusable(f"{type(error).__name__}: {error}"))
        else:
            if missing := describe_missing(command.expected, search.newest_there):
                self._post(StorageAway(missing, is_missing=True))
                return
            damaged = tuple((str(name), str(error)) for name, error in search.damaged)
            self._post(CheckpointFound(str(search.name) if search.name else None, damaged))

    async def commit(self, name: str, parts: tuple[SavedPart, ...], state: Attempt) -> None:
        """Writes the marker of a complete set of parts of one generation."""
        first = parts[0]
        [checkpoint] = _parse((name,))
        async with self._one_at_a_time:
            try:
                await asyncio.to_thread(self._require_current)
                job_id, attempt = state.config.job_id, state.config.attempt
                marker = await self._wait_for_answer(
                    partial(self._catalog.commit, parts, job_id=job_id, attempt=attempt, now=self._clock.time()), state
                )
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                self._show(checkpoint, CheckpointState.FAILED, message=message, **_measure(parts))
                self._post(CommitFailed(name, first.generation, message))
                return
            self._show(checkpoint, CheckpointState.COMMITTED, committed_at=marker.committed_at, **_measure(parts))
            self._post(CheckpointCommitted(name, first.generation, first.step))
            self._committed.add(name)
            await self._retain(state)

    async def remove_torn(self, state: Attempt) -> None:
        """Deletes the checkpoints that were never committed. Called after the end of the attempt and of its workers.

        If head or storage do not answer soon, they are left to the retention of a later attempt.
        """
        try:
            await self._clock.wait_for(self._remove_torn(state), _REMOVE_S)
        except Exception as error:
            _log.warning("checkpoint.torn_not_removed", extra={"error": f"{type(error).__name__}: {error}"})

    def show_damaged(self, name: str, message: str) -> None:
        [damaged] = _parse((name,))
        self._show(damaged, CheckpointState.DAMAGED, message=message)

    def _show(self, name: CheckpointName, state: CheckpointState, **details: Any) -> None:
        """Report what has become of a checkpoint. `details`: further fields of the view."""
        self._reporter.add(
            CheckpointView(
                step=name.step,
                url=self._catalog.url(name),
                state=state,
                attempt=name.attempt,
                generation=name.generation,
                **details,
            )
        )

    async def _wait_for_answer(self, call: Callable[[], T], state: Attempt) -> T:
        """Waits for a blocking call, and returns its result. Its thread cannot be ended, so none is started beside one
        that hangs."""
        limit_s = state.config.timeouts.commit_s
        if self._hanging is not None and not self._hanging.done():
            raise StorageHangs(f"the storage has still not answered a call that was given up after {limit_s:g} s")
        calling = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            return await self._clock.wait_for(asyncio.shield(calling), limit_s)
        except TimeoutError:
            if calling.done():
                raise
            self._hanging = calling
            calling.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, whatever it is
            raise StorageHangs(f"the storage did not answer within {limit_s:g} s (timeouts.commit_s)") from None

    def _find(self, command: FindCheckpoint) -> Found:
        search = partial(self._catalog.search, excluding=_parse(command.excluding))
        if not self._is_checked:
            if command.expected is not None and describe_missing(
                command.expected, (checkpoint_found := search()).newest_there
            ):
                return checkpoint_found  # nothing is written here: it would count when the job's directory is back
            self._catalog.check_writable()
            self._catalog.begin(self._config.attempt)
            self._is_checked = True
        return search()

    async def _remove_torn(self, state: Attempt) -> None:
        committing = _parse(state.checkpoints.committing)
        await asyncio.to_thread(self._catalog.remove_torn, in_flight=committing, by=self._make_deleter(state))

    def _make_deleter(self, state: Attempt) -> Deleter:
        return Deleter(state.config.attempt, state.life, self._require_current)

    async def _retain(self, state: Attempt) -> None:
        try:
            deleted = await self._wait_for_answer(
                partial(
                    self._catalog.retain,
                    self._config.spec.checkpoint.keep,
                    damaged=_parse(state.checkpoints.damaged),
                    in_flight=_parse(n for n in state.checkpoints.committing if n not in self._committed),
                    pinned=_parse(state.target.pinned),
                    best=state.history.standing.kept_steps if state.history.standing is not None else (),
                    by=self._make_deleter(state),
                ),
                state,
            )
        except Exception as error:  # training goes on without; the next commit tries again
            self._reporter.emit(CheckpointRetentionFailed(message=f"{type(error).__name__}: {error}"))
            return
        for name in deleted:
            self._show(name, CheckpointState.DELETED)


def _parse(names: Iterable[str]) -> list[CheckpointName]:
    return [parsed for parsed in (CheckpointName.parse(name) for name in names) if parsed is not None]


def _measure(parts: tuple[SavedPart, ...]) -> dict[str, float]:
    """Return size and durations of a checkpoint, by the names that its view has for them."""
    return {
        "bytes": sum(file.bytes for part in parts for file in part.files),
        "seconds": max(part.stall_s + part.write_s for part in parts),
        "stall_s": max(part.stall_s for part in parts),
        "world_size": len(parts),
    }


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
            content = place.read(probe)
            place.remove(probe)
        except OSError as error:
            raise StorageUnusable(
                self._root, _in_one_line(error), _describe_way_out(self._root), is_final=_is_final(error)
            ) from error
        if content != probe.encode():
            reason = f"{len(probe)} bytes were written, but {len(content)} different bytes were read back"
            raise StorageUnusable(self._root, reason, _describe_way_out(self._root))

    def begin(self, attempt: int) -> None:
        """Notes which checkpoints are there when the attempt begins. An earlier attempt may still train in a cluster
        that was given up; what it commits from now on never counts. Repeating it is harmless."""
        root = open_job_directory(self._root)
        beginnings.begin(root, attempt, _list_when_iterated(root))

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

    def search(self, excluding: Collection[CheckpointName] = ()) -> Found:
        damaged: list[tuple[CheckpointName, DamagedCheckpoint]] = []
        newest_there: CheckpointName | None = None
        for name in self._list_counting():
            if name in excluding:
                if newest_there is None and self.has_marker(name):
                    newest_there = name
                continue
            try:
                marker_in(self._open(name))
            except DamagedCheckpoint as error:
                if self.has_marker(name):  # else it was never committed
                    damaged.append((name, error))
                    newest_there = newest_there or name
                continue
            return Found(name, tuple(damaged), newest_there or name)
        return Found(None, tuple(damaged), newest_there)

    def markers(self) -> list[tuple[CheckpointName, CommitMarker]]:
        """Every committed checkpoint, newest first, without those with a damaged marker."""
        numbered = ((name, self._read_marker(name)) for name in self._list_counting())
        return [(name, marker) for name, marker in numbered if marker is not None]

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
        """Return whether there is a marker, also a damaged one."""
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
        names = self._list_names()
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
        for name in self._list_names():
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

    def _list_names(self) -> list[CheckpointName]:
        return checkpoint_names(open_job_directory(self._root))

    def _list_counting(self) -> list[CheckpointName]:
        """Leaves out the checkpoints that an earlier attempt has committed after a later one had begun."""
        root = open_job_directory(self._root)
        newest = beginnings.newest_beginning(root)
        return [name for name in checkpoint_names(root) if newest.counts(name)]

    def _read_marker(self, name: CheckpointName) -> CommitMarker | None:
        try:
            return marker_in(self._open(name))
        except DamagedCheckpoint:
            return None


def _list_when_iterated(root: Directory) -> Iterator[CheckpointName]:
    """Lists the directories when it is iterated."""
    yield from checkpoint_names(root)


def _is_final(error: OSError) -> bool:
    """Return whether trying again cannot help: the URL, its rights or an installed library must change. Everything else
    (time-outs, refused connections, I/O errors, a stale mount) may pass."""
    wrong = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
    is_unknown = isinstance(error.__cause__, (ValueError, ImportError))
    return is_unknown or isinstance(error, wrong) or error.errno == errno.EROFS


def _in_one_line(error: OSError) -> str:
    reason = " ".join(str(error).split())
    return reason if type(error) is OSError else f"{type(error).__name__}: {reason}"


def _describe_way_out(root: str) -> str:
    if "://" in root and not root.startswith("file://"):
        return (
            "Check that the bucket exists, that the credentials in the environment of every node may read, write and "
            "delete there, and that the protocol's library is installed (for s3:// the extra: shoal[s3])."
        )
    return (
        "Use a directory that the user who runs the cluster may write, and that every node reaches under the same path."
    )


def why_unreadable(root: str, name: str) -> str:
    """Why the checkpoints of a job cannot be read from this node; it may hang.

    Empty if the checkpoint of this name, or a newer one, is there; with an empty name, if the directory is.

    Args:
        root: URL of the job's directory.
    """
    try:
        return _explain_missing(root, name)
    except (OSError, ValueError, ImportError) as error:
        return f"{root} cannot be read: {type(error).__name__}: {error}"


def _explain_missing(root: str, name: str) -> str:
    if not name:
        try:
            open_job_directory(root).files()
        except FileNotFoundError:
            return f"{root} is not there"
        return ""
    if CheckpointName.parse(name) is None:
        return f"{name!r} is not the name of a checkpoint"
    missing = describe_missing(name, CheckpointCatalog(root).search().newest_there)
    return f"{root}: {missing}" if missing else ""
