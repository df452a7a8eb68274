"""The directory in which the program of a job runs on a node: one for each job, with a copy of its code.

    ~/.cache/shoal/jobs/KEY          working directory of all workers of the job on this node, in every attempt
    ~/.cache/shoal/jobs/KEY.json     DirectoryState: which code it has, and the files that are no outputs
    ~/.cache/shoal/jobs/KEY.use      as for packages: each worker holds a shared lock of it as long as it lives
    ~/.cache/shoal/jobs/KEY.lock     held while the directory is changed or read as a whole

Ray unpacks the code of a job into a directory that all jobs with the same code share. Nothing may be written there, so
the worker leaves it before it imports anything of the user's. Files are copied, or share blocks where the file system
can (FICLONE), and are never links. A new version of the code replaces the files of the old one; what the program has
written stays. A directory that no worker has used for KEEP_S, or whose job was deleted, is removed when a worker of
another job starts on the node. Called by the actor, before the program is loaded.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pydantic import Field, ValidationError

from shoal_workers.checkpoint.local import LocalDirectory
from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.outputs import FOLDER
from shoal_workers.node_lock import node_lock
from shoal_workers.package_sets import hold, remove, root_of_node, unused

KEEP_S = 30 * 86_400.0
"""Seconds without use after which the directory of a job is removed from a node. Its outputs are in the storage."""
_SWEEP_EVERY_S = 3600.0
_MIN_UNUSED_S = 600.0
"""The directory of a deleted job is removed after this many seconds without use."""
_FICLONE = 0x40049409
_NO_CLONE = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM)
_COMPILED = "__pycache__"
Stamp = tuple[int, int]
"""Bytes of a file, and the time of its last change in nanoseconds."""


class DirectoryState(Frozen):
    """What is noted of the directory beside it."""

    directory: str
    """Identity: another one on each node, and after a removal."""
    root: str
    """URL of the job's storage."""
    code: str = ""
    """SHA-256 of the code's archive; empty: the job has none, or it was not copied completely."""
    code_files: dict[str, Stamp] = Field(default_factory=dict)
    restored_files: dict[str, Stamp] = Field(default_factory=dict)
    restored_for: int = 0
    """Attempt for which the outputs in the storage were last restored."""

    def is_input(self, name: str, stamp: Stamp) -> bool:
        """True if the file is as it was copied or restored, so the program has not written it."""
        return stamp in (self.code_files.get(name), self.restored_files.get(name))


class JobDirectory:
    """The directory of one job on this node, for one worker. Training thread, except where noted."""

    def __init__(self, job_id: str, checkpoint_root: str, base: Path | None = None) -> None:
        self._key = f"{job_id}-{hashlib.sha256(checkpoint_root.encode()).hexdigest()[:8]}"
        self._root = checkpoint_root
        self._base = base
        self._use: IO[bytes] | None = None
        self._opened: tuple[int, Stamp] | None = None

    @property
    def path(self) -> Path:
        """The working directory; `open` has been called."""
        return self._folder / self._key

    def open(self, code: Path | None, version: str, note: Callable[[str], None]) -> None:
        """Make the directory, and copy the code into it. Idempotent.

        Args:
            code: directory with the unpacked code; None if the job has none.
            version: of the code.
            note: called with what is done or waited for.

        Raises:
            OSError: the directory cannot be written.
        """
        self._base = _writable(self._base or root_of_node().parent / "jobs")
        if self._use is None:
            self._use = hold(self._base, self._key, note)
        with self.locked(note):
            self.path.mkdir(mode=0o700, exist_ok=True)
            state = self.state()
            if code is not None and state.code != version:
                note("copying the code")
                self.put_state(state.model_copy(update={"code": ""}))
                files = _copy_code(code, self.path, state.code_files)
                self.put_state(state.model_copy(update={"code": version, "code_files": files}))
            elif not self._state_path.exists():
                self.put_state(state)
            self._opened = self._state_stamp()

    @property
    def is_as_opened(self) -> bool:
        """True if no worker has changed the state since `open`; for a check that must not wait for the lock."""
        try:
            return self._opened == self._state_stamp()
        except FileNotFoundError:
            return False

    def sweep(self) -> None:
        """Remove directories of other jobs that are not needed any more. Once an hour on a node; any thread."""
        mark = self._folder / "swept"
        with suppress(FileNotFoundError):
            if time.time() - mark.stat().st_mtime < _SWEEP_EVERY_S:
                return
        mark.touch()
        for other in unused(self._folder, for_s=_MIN_UNUSED_S):
            if other.unused_s >= KEEP_S or _is_deleted(self._folder / f"{other.name}.json"):
                with suppress(OSError):
                    remove(self._folder, other.name, for_s=_MIN_UNUSED_S)

    def close(self) -> None:
        """This process uses the directory no longer."""
        if self._use is not None:
            self._use.close()
            self._use = None

    @contextmanager
    def locked(self, note: Callable[[str], None] = lambda _: None) -> Iterator[None]:
        """Hold the lock of the directory. Any thread."""
        with node_lock(self._folder / f"{self._key}.lock", note):
            yield

    def state(self) -> DirectoryState:
        """Return what is noted; a new state if nothing is. Any thread, under the lock."""
        try:
            return DirectoryState.model_validate_json(self._state_path.read_bytes(), extra="ignore")
        except (FileNotFoundError, ValidationError):
            return DirectoryState(directory=uuid.uuid4().hex, root=self._root)

    def put_state(self, state: DirectoryState) -> None:
        """Note the state. Any thread, under the lock."""
        draft = self._state_path.with_suffix(".writing")
        draft.write_text(state.model_dump_json(), encoding="utf-8")
        draft.replace(self._state_path)

    def _state_stamp(self) -> tuple[int, Stamp]:
        status = self._state_path.stat()
        return status.st_ino, stamp_of(status)

    @property
    def _folder(self) -> Path:
        assert self._base is not None
        return self._base

    @property
    def _state_path(self) -> Path:
        return self._folder / f"{self._key}.json"


def enter(directory: Path, before: Path, variables: Iterable[str] = ("PYTHONPATH",)) -> None:
    """Make `directory` the working directory of this process and of its children, also for their imports.

    Args:
        before: directory from which modules are imported no longer.
        variables: names of environment variables with paths of directories for imports.
    """
    os.chdir(directory)
    shared = os.path.realpath(before)

    def moved(entry: str) -> str:
        absolute = os.path.realpath(entry) if entry else ""
        below = absolute.removeprefix(shared)
        return f"{directory}{below}" if absolute.startswith(shared) and below[:1] in ("", os.sep) else entry

    sys.path[:] = [moved(entry) for entry in sys.path]
    for name in variables:
        if path := os.environ.get(name):
            os.environ[name] = os.pathsep.join(moved(entry) for entry in path.split(os.pathsep))


def _writable(base: Path) -> Path:
    """Return the directory of jobs: `base`, or a private one below the directory of temporary files if that is
    read-only."""
    for folder in (base, Path(tempfile.gettempdir()) / f"shoal-jobs-{os.getuid()}"):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK) and folder.stat().st_uid == os.getuid():
                return folder
    raise PermissionError(errno.EACCES, "no directory for the files of jobs can be made", str(base))


def _copy_code(source: Path, target: Path, before: dict[str, Stamp]) -> dict[str, Stamp]:
    """Copy all regular files, remove those of the version before that are gone, and return the stamps of the copies."""
    files: dict[str, Stamp] = {}
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if name != _COMPILED]
        place = target / Path(folder).relative_to(source)
        _make_folder(place)
        shutil.rmtree(place / _COMPILED, ignore_errors=True)
        for name in names:
            path = Path(folder) / name
            if stat.S_ISREG(path.lstat().st_mode):
                _copy(path, place / name)
                files[str((place / name).relative_to(target))] = stamp_of((place / name).lstat())
    for name in before.keys() - files.keys():
        with suppress(OSError):
            if stamp_of((target / name).lstat()) == before[name]:
                (target / name).unlink()
    return files


def _make_folder(place: Path) -> None:
    """Make a directory where the program may have put something else."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(place.lstat().st_mode):
            place.unlink()
    place.mkdir(exist_ok=True)


def _copy(source: Path, target: Path) -> None:
    """Copy a file; the two share blocks where the file system can. A reader of the old target keeps what it reads."""
    draft = target.with_name(f".{uuid.uuid4().hex}.writing")
    with source.open("rb") as read, draft.open("xb") as write:
        try:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
        except OSError as error:
            if error.errno not in _NO_CLONE:
                raise
            shutil.copyfileobj(read, write)
        os.fchmod(write.fileno(), stat.S_IMODE(os.fstat(read.fileno()).st_mode) | stat.S_IWUSR)
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(target.lstat().st_mode):
            shutil.rmtree(target)
    draft.replace(target)


def stamp_of(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns


def _is_deleted(note: Path) -> bool:
    """True if the job's outputs have gone from a storage that is there. A remote storage is not asked."""
    try:
        root = open_job_directory(DirectoryState.model_validate_json(note.read_bytes(), extra="ignore").root)
        if not isinstance(root, LocalDirectory):
            return False
        path = root.path
        return path.parent.is_dir() and not (path / FOLDER).exists()
    except (OSError, ValidationError):
        return False
