"""The slot registry: the directories of all processes' slots, which processes are alive, and removal after dead ones.

    <root>/shoal-<uid>/                      mode 0700
        <job>-a<attempt>/
            .lock                            held shared by every live process of the attempt on this machine
            <memory id>/                     processes that read each other's slots: of one machine, or of one node
                <worker id>.<random>/        one per process
                    owner                    held exclusively by its process
                    own-*, buddy-*           slots with parts

The kernel releases both locks when their holder dies, also by SIGKILL: if a lock can be acquired, its holders are dead.
A sweeper must not delete the directory of a process that is starting. The process therefore checks, once it holds the
lock, that the file that it locked still has its name; a sweeper renames a directory before it deletes it. The directory
of a process is locked before it gets its final name, so a directory without a lock belongs to a dead process.

An attempt whose processes on this machine have all died may be about to start one that reads what they left. So another
job's sweeper only marks it with the time, and removes it KEEP_S later; a process that joins it removes the mark. It is
removed at once if its job has a later attempt, or if memory is needed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from shoal_workers.descriptors import close_after, is_at, try_lock
from shoal_workers.snapshot_store.slots.retention import is_outdated
from shoal_workers.snapshot_store.slots.slot_files import PartHeader, read_header, read_sequence

_LOCK = ".lock"
_OWNER = "owner"
_TRASH = ".trash-"
_STARTING = ".starting-"
_ABANDONED = ".abandoned"
_TRIES = 1000
KEEP_S = 120.0
"""Longer than a supervisor waits for a worker that is started to read the snapshots of a node (Timeouts.orphans_s)."""
_PARTS = ("own-", "buddy-")
_LIVE = ("own-live-",)


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A complete part in this node's memory, open for reading; it stays readable if its name is removed meanwhile."""

    fd: int
    header: PartHeader

    def is_unchanged(self) -> bool:
        return read_sequence(self.fd) == self.header.sequence

    def read_description(self) -> tuple[bytes, bytes] | None:
        """Return its index and its plain values, both JSON; None if it is being overwritten."""
        header = self.header
        index = os.pread(self.fd, header.index_bytes, header.index_offset)
        extra = os.pread(self.fd, header.extra_bytes, header.extra_offset)
        return (index, extra) if self.is_unchanged() else None


class SlotRegistry:
    """This process's directory, within its memory's, within its attempt's; holds both locks until `close`."""

    def __init__(self, root: Path, *, job_id: str, attempt: int, memory_id: str, worker_id: str) -> None:
        """OSError if `root` cannot be used."""
        self._is_closed = False
        self._paths: dict[tuple[int, int, int], Path] = {}
        """The files of the complete parts in the last scan, by generation, rank and step."""
        self._base = _base(root)
        self._attempt = self._base / _segment(f"{job_id}-a{attempt}")
        self.node = self._attempt / _segment(memory_id)
        for _ in range(_TRIES):
            try:
                _make_private(self._base)
                self._lock = _join(self._attempt)
                try:
                    _make(self.node)
                    self._owner, self.path = _claim(self.node, _segment(worker_id))
                    return
                except FileNotFoundError:
                    os.close(self._lock)
            except FileNotFoundError:  # a sweeper removed the directory between two of these lines
                pass
        raise OSError(f"{self._attempt} was removed by other processes {_TRIES} times while this process started in it")

    def parts(self) -> Iterator[tuple[Path, PartHeader]]:
        """Yield every complete part in this node's memory, of all processes."""
        for path in self._slots(self.node, _PARTS):
            header = _read_header_at(path)
            if header is not None:
                yield path, header

    def live_slots_of_others(self) -> Iterator[Path]:
        """Yield the live slots of all other processes in this node's memory, with or without a complete part."""
        for process in _directories(self.node):
            if process != self.path:
                yield from self._slots_of(process, _LIVE)

    def scan(self) -> None:
        """Notes where all parts are, so that opening several does not read all slots of the node for each of them."""
        self._paths = {(header.generation, header.rank, header.step): path for path, header in self.parts()}

    @contextmanager
    def open_part(self, generation: int, rank: int, step: int, *, scans: bool = True) -> Iterator[OpenPart | None]:
        """The part if it is here, complete; None otherwise. `scans`: also if the last scan did not see it."""
        part = self._open_known(generation, rank, step)
        if part is None and scans:
            self.scan()
            part = self._open_known(generation, rank, step)
        try:
            yield part
        finally:
            if part is not None:
                os.close(part.fd)

    def remove_dead_slots(self, generation: int) -> None:
        """Remove the dead processes' slots on this node that are incomplete or of generations before this one."""
        for process in _directories(self.node):
            if process == self.path or _is_locked(process / _OWNER):
                continue
            for path in self._slots_of(process, _PARTS):
                if is_outdated(_read_header_at(path), before=generation):
                    path.unlink(missing_ok=True)
            if not any(self._slots_of(process, _PARTS)):
                shutil.rmtree(process, ignore_errors=True)

    def remove_attempt(self) -> None:
        """The attempt is over: removes its directory on this machine, also of nodes without a live process.

        Several nodes share a machine in tests, and as containers that share one memory.
        """
        _discard(self._attempt)
        self._remove_base()

    def close(self) -> None:
        """Remove this process's directory; the last process of the attempt on this machine removes the attempt's."""
        if self._is_closed:
            return
        self._is_closed = True
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._owner)
        # Only the last process of the attempt gets the lock, because all others hold it shared.
        if try_lock(self._lock) and is_at(self._lock, self._attempt / _LOCK):
            _discard(self._attempt)
        os.close(self._lock)
        with suppress(OSError):
            self.node.rmdir()
        self._remove_base()

    def _open_known(self, generation: int, rank: int, step: int) -> OpenPart | None:
        path = self._paths.get((generation, rank, step))
        if path is None:
            return None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        header = read_header(fd)
        if header is not None and (header.generation, header.rank, header.step) == (generation, rank, step):
            return OpenPart(fd, header)
        os.close(fd)
        return None

    def _slots(self, node: Path, kinds: tuple[str, ...]) -> Iterator[Path]:
        for process in _directories(node):
            yield from self._slots_of(process, kinds)

    @staticmethod
    def _slots_of(process: Path, kinds: tuple[str, ...]) -> Iterator[Path]:
        for path in _entries(process):
            if path.name.startswith(kinds):
                yield path

    def _remove_base(self) -> None:
        with suppress(OSError):  # it is not empty, or was removed
            self._base.rmdir()


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a process that starts may remove of others. `now`: seconds since the boot of the machine."""

    job_id: str
    attempt: int
    now: float

    def may_remove(self, directory: Path) -> bool:
        """`directory`: of an attempt without a live process, which the caller has locked."""
        job, _, number = directory.name.rpartition("-a")
        if job == _segment(self.job_id) and number.isdecimal() and int(number) < self.attempt:
            return True
        mark = directory / _ABANDONED
        try:
            return self.now - float(mark.read_text()) >= KEEP_S
        except (OSError, ValueError):
            mark.write_text(repr(self.now))
            return False


def sweep_stale(root: Path, sweep: Sweep | None = None) -> list[str]:
    """Remove every attempt without a live process on this machine, of those that `sweep` lets it remove (None means
    all); return their names. Never raises for a race."""
    swept = []
    base = _base(root)
    for attempt in _entries(base):
        if attempt.name.startswith(_TRASH):  # the sweeper that renamed it died before it deleted it
            shutil.rmtree(attempt, ignore_errors=True)
        elif _sweep(attempt, sweep):
            swept.append(attempt.name)
    with suppress(OSError):
        base.rmdir()
    return swept


def remove_attempts(attempts: Iterable[tuple[str, int]], root: Path = Path("/dev/shm"), *, wait_s: float = 5.0) -> None:
    """Remove what processes of these attempts (job, number) left on this machine. They have been killed; the kernel
    closes the files of a large process some time after it has become a zombie, so they get `wait_s` to release their
    locks. A live process keeps its own."""
    deadline = time.monotonic() + wait_s
    for job_id, attempt in attempts:
        directory = _base(root) / _segment(f"{job_id}-a{attempt}")
        while not _sweep(directory, None) and directory.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    with suppress(OSError):
        _base(root).rmdir()


def _sweep(attempt: Path, sweep: Sweep | None) -> bool:
    with _opened(attempt / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
        is_dead = fd is not None and try_lock(fd) and is_at(fd, attempt / _LOCK)
        return is_dead and (sweep is None or sweep.may_remove(attempt)) and _discard(attempt)


def _discard(attempt: Path) -> bool:
    """No process writes into it. Renamed first, because a new attempt of that name may start at any moment."""
    trash = attempt.with_name(f"{_TRASH}{attempt.name}-{secrets.token_hex(4)}")
    try:
        attempt.rename(trash)
    except FileNotFoundError:
        return False
    shutil.rmtree(trash, ignore_errors=True)
    return True


def _base(root: Path) -> Path:
    return root / f"shoal-{os.geteuid()}"


def _make_private(base: Path) -> None:
    _make(base)
    status = base.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o170077 != 0o040000:
        raise PermissionError(f"{base} is not a directory that belongs to this user with mode 0700; remove it.")


def _make(directory: Path) -> None:
    with suppress(FileExistsError):  # exist_ok of mkdir raises if a sweeper removes it in between
        directory.mkdir(mode=0o700)


def _join(attempt: Path) -> int:
    """Return the attempt's lock, held shared. FileNotFoundError if a sweeper removed it meanwhile."""
    _make(attempt)
    fd = os.open(attempt / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # Waits while a sweeper holds it. The check below finds out whether that one has removed the attempt.
    fcntl.flock(fd, fcntl.LOCK_SH)
    if not is_at(fd, attempt / _LOCK):
        os.close(fd)
        raise FileNotFoundError(str(attempt))
    (attempt / _ABANDONED).unlink(missing_ok=True)
    return fd


def _claim(node: Path, worker: str) -> tuple[int, Path]:
    """A new directory for this process: the descriptor that holds its lock, and its path."""
    token = secrets.token_hex(4)
    starting = node / f"{_STARTING}{token}"
    starting.mkdir(mode=0o700)
    fd = os.open(starting / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)  # before it has its name: a directory that nobody locks counts as a dead process's
    final = node / f"{worker}.{token}"
    try:
        starting.rename(final)
    except FileNotFoundError:
        os.close(fd)
        raise
    return fd, final


def _read_header_at(path: Path) -> PartHeader | None:
    """Return the header of the complete part in the file; None also if the file was removed."""
    with _opened(path, os.O_RDONLY) as fd:
        return None if fd is None else read_header(fd)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int | None]:
    """Open a file for a block; None if it was removed."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    with close_after(fd):
        yield fd


def _is_locked(path: Path) -> bool:
    with _opened(path, os.O_RDWR) as fd:
        return fd is not None and not try_lock(fd)


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(path / entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    except FileNotFoundError:
        return []


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except FileNotFoundError:
        return []


def _segment(name: str) -> str:
    """Return the name as one path segment; never hidden, never `.` or `..`."""
    quoted = quote(name, safe="")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id(root: Path = Path("/dev/shm")) -> str:
    """Return the boot of the machine, and the file system that is mounted at `root`. OSError if there is none."""
    boot = _BOOT_ID.read_text().strip()
    return f"{boot}-{root.stat().st_dev:x}"
