"""A slot is a file of shared memory that holds one part of one snapshot and outlives its process. A pool has the slots
of one kind ("own", "own-live", "buddy" or "log") of this process.

    0        8          16                                  4096
    | magic  | sequence | generation, rank, step ... | ....  | index JSON | extra JSON | payload, page-aligned |

The sequence word is odd while the part is being written and even when it is complete, so readers ignore the part of a
writer that was killed in the middle. The word starts at a random number and only grows, so two equal words mean that
nothing was written in between. A file is allocated and touched before it gets its name. It may get longer, and memory
at its end may be given back, but it never gets shorter, so access to a map of it cannot raise SIGBUS. There are no
checksums: at every step they would cost as much as the copy itself.

`retention` decides which slots may be overwritten. Of those, the pool takes over the one whose size is right, or
closest: a slot that is too small grows, and one of more than twice the size gives memory back (`SlotFile.fits`). Its
other pages are warm, which makes it 10 to 25 times as fast as a new slot.

Imports no torch. The classes of the kinds of slots, the registry and the readers call it.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shoal_workers.descriptors import close_after
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull

PAGE_BYTES = 4096
_MAGIC = b"SHOALRM1"
_START = struct.Struct("=8sQ")
_FIELDS = struct.Struct("=10q")
_WORD_OF_SEQUENCE = 1
_ALIGNMENT_BYTES = 64
_SMALL_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Regions:
    """Offsets and lengths, in bytes, of the regions of a part in its file."""

    index_offset: int
    index_bytes: int
    extra_offset: int
    extra_room: int
    payload_offset: int
    num_bytes: int

    @staticmethod
    def lay_out(*, index_bytes: int, extra_room: int, num_bytes: int) -> Regions:
        extra_offset = _round_up(PAGE_BYTES + index_bytes, _ALIGNMENT_BYTES)
        payload_offset = _round_up(extra_offset + extra_room, PAGE_BYTES)
        return Regions(PAGE_BYTES, index_bytes, extra_offset, extra_room, payload_offset, num_bytes)

    @property
    def file_bytes(self) -> int:
        return _round_up(self.payload_offset + self.num_bytes, PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Stamp:
    """Names the shard whose state a part holds, and the step after which. `rank` and `world_size` count shards: see
    contract/snapshots.py."""

    generation: int
    rank: int
    world_size: int
    step: int


@dataclass(frozen=True, slots=True)
class PartHeader:
    """The header of a complete part."""

    sequence: int
    generation: int
    rank: int
    world_size: int
    step: int
    num_bytes: int
    """The bytes of the payload."""
    payload_offset: int
    index_offset: int
    index_bytes: int
    extra_offset: int
    extra_bytes: int


class SlotFile:
    """A slot as its owner has it: mapped, touched, writable. The owner allows one writer at a time."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        """SharedMemoryFull if there is no room, or if the directory was removed."""
        self.path = path
        self.capacity_bytes = capacity_bytes
        """Bytes that have memory; the file may be longer."""
        self.header: PartHeader | None = None
        """The header of the complete part in it; None if there is no complete part."""
        self.attached: object = None
        """What refers to the memory, such as tensors over it; dropped before memory is given back."""
        temporary = path.with_name(f".new-{path.name}")
        try:
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as error:
            raise _as_memory_full(error, path, capacity_bytes) from None
        try:
            self._map(fd, capacity_bytes)
            _START.pack_into(self.map, 0, _MAGIC, secrets.randbits(62) | 1)
            temporary.rename(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise _as_memory_full(error, path, capacity_bytes) from None
        finally:
            os.close(fd)  # the map holds a descriptor of its own

    def is_of(self, generation: int | None, step: int | None) -> bool:
        """Return whether it holds the complete part of this generation after this step."""
        return self.header is not None and (self.header.generation, self.header.step) == (generation, step)

    def fits(self, needed_bytes: int) -> bool:
        """Return whether it is large enough, and at most twice as large as needed (or 1 MiB)."""
        return needed_bytes <= self.capacity_bytes and not self.is_wasteful(needed_bytes)

    def is_wasteful(self, needed_bytes: int) -> bool:
        return self.capacity_bytes > max(2 * needed_bytes, _SMALL_BYTES)

    def resize(self, num_bytes: int) -> None:
        """Get memory for this many bytes, or give back what lies behind them. Afterwards it holds no part.

        SharedMemoryFull: its capacity is as before.
        """
        self.begin()
        self.attached = None
        num_bytes = _round_up(num_bytes, PAGE_BYTES)
        if num_bytes >= self.capacity_bytes:
            self.grow(num_bytes)
            return
        with suppress(OSError):  # only a tmpfs is sure to do this; elsewhere the slot keeps its memory
            self.map.madvise(mmap.MADV_REMOVE, num_bytes, self.capacity_bytes - num_bytes)
            self.capacity_bytes = num_bytes

    def grow(self, num_bytes: int) -> None:
        """Get memory for at least this many bytes. The part in it stays complete, and tensors over the old `map` stay
        valid, since both map the same file. Only new pages are touched.

        SharedMemoryFull: its capacity is as before.
        """
        if num_bytes <= self.capacity_bytes:
            return
        num_bytes = _round_up(num_bytes, PAGE_BYTES)
        old_map, old_words = self.map, self._words
        try:
            with close_after(os.open(self.path, os.O_RDWR | os.O_CLOEXEC)) as fd:
                self._map(fd, num_bytes)
        except OSError as error:
            raise _as_memory_full(error, self.path, num_bytes) from None
        self.capacity_bytes = num_bytes
        old_words.release()
        # Not closed: tensors refer to the old map without exporting its buffer, so that would unmap it under them.
        del old_map

    def begin(self) -> None:
        """From here until `finish`, readers do not accept its content as a part."""
        self.header = None
        self._words[_WORD_OF_SEQUENCE] |= 1

    def finish(self, regions: Regions, stamp: Stamp, *, num_extra_bytes: int) -> None:
        """The part is complete. Called after `begin`."""
        header = PartHeader(
            sequence=self._words[_WORD_OF_SEQUENCE] + 1,
            generation=stamp.generation,
            rank=stamp.rank,
            world_size=stamp.world_size,
            step=stamp.step,
            num_bytes=regions.num_bytes,
            payload_offset=regions.payload_offset,
            index_offset=regions.index_offset,
            index_bytes=regions.index_bytes,
            extra_offset=regions.extra_offset,
            extra_bytes=num_extra_bytes,
        )
        place = (stamp.generation, stamp.rank, stamp.world_size, stamp.step)
        sizes = (header.num_bytes, header.payload_offset, header.index_offset, header.index_bytes)
        _FIELDS.pack_into(self.map, _START.size, *place, *sizes, header.extra_offset, num_extra_bytes)
        # The word last: a reader that finds it even finds the fields and the content of this part.
        self._words[_WORD_OF_SEQUENCE] = header.sequence
        self.header = header

    def remove(self) -> None:
        """The memory is free once no process maps it."""
        self.header = None
        self.attached = None
        with suppress(OSError):
            self.path.unlink()
        self._words.release()
        with suppress(BufferError):  # a tensor over it still exists; the last one unmaps it
            self.map.close()

    def _map(self, fd: int, num_bytes: int) -> None:
        # A page that the file system cannot provide later would end the process with SIGBUS.
        os.posix_fallocate(fd, 0, num_bytes)
        self.map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._words = memoryview(self.map)[: _START.size].cast("Q")


def read_header(fd: int) -> PartHeader | None:
    """Return the header of the complete part in an open file; None if there is none."""
    data = os.pread(fd, _START.size + _FIELDS.size, 0)
    if len(data) < _START.size + _FIELDS.size:
        return None
    magic, sequence = _START.unpack_from(data)
    if magic != _MAGIC or sequence % 2:
        return None
    generation, rank, world_size, step, *rest = _FIELDS.unpack_from(data, _START.size)
    header = PartHeader(sequence, generation, rank, world_size, step, *rest)
    end = max(header.payload_offset + header.num_bytes, header.extra_offset + header.extra_bytes)
    # The same word after the fields were read: no writer has changed them in between.
    if min(rest) < 0 or end > os.fstat(fd).st_size or read_sequence(fd) != sequence:
        return None
    return header


def read_sequence(fd: int) -> int:
    """Return the sequence word as it is now."""
    return int(_START.unpack(os.pread(fd, _START.size, 0))[1])


def _as_memory_full(error: OSError, path: Path, needed_bytes: int) -> Exception:
    """SharedMemoryFull if there was no room, or if the directory was removed; else the error itself."""
    if isinstance(error, FileNotFoundError):
        return _full(path.parent, needed_bytes, "the directory of the attempt was removed")
    if error.errno in _NO_ROOM:
        return _full(path.parent, needed_bytes, os.strerror(error.errno))
    return error


def _full(directory: Path, needed_bytes: int, why: str) -> SharedMemoryFull:
    try:
        space = os.statvfs(directory)
    except OSError:
        return SharedMemoryFull(str(directory), needed_bytes, 0, why)
    return SharedMemoryFull(str(directory), needed_bytes, space.f_bavail * space.f_frsize, why)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


T = TypeVar("T")


class SlotPool:
    def __init__(self, directory: Path, kind: str, make_room: Callable[[], bool] | None = None) -> None:
        """`kind`: start of the files' names; the registry finds names that begin with `own-`, `buddy-` or `log-`.
        `make_room`: called if there is no room; if it returns True, the allocation is tried again."""
        self._directory = directory
        self._kind = kind
        self._make_room = make_room
        self._lock = threading.Lock()
        self._slots: list[SlotFile] = []
        self._num_allocated = 0

    @property
    def slots(self) -> tuple[SlotFile, ...]:
        """All slots, in the order in which they were allocated."""
        with self._lock:
            return tuple(self._slots)

    def take(self, free: Iterable[SlotFile], num_bytes: int, *, headroom_bytes: int = 0) -> SlotFile:
        """Return one of these slots, which may be overwritten: the first that fits, else the closest in size, which is
        resized with the headroom and holds no part afterwards. If there is none, a new one with the headroom, touched.

        If there is no room, the others of these slots are removed for it. SharedMemoryFull."""
        candidates = list(free)
        if not candidates:
            return self._allocate(num_bytes + headroom_bytes)
        if usable := fitting(candidates, num_bytes):
            return usable[0]
        closest = min(candidates, key=lambda slot: abs(slot.capacity_bytes - num_bytes))
        try:
            self._with_room(lambda: closest.resize(num_bytes + headroom_bytes))
        except SharedMemoryFull:
            if len(candidates) == 1:
                raise
            self.release(candidate for candidate in candidates if candidate is not closest)
            closest.resize(num_bytes + headroom_bytes)
        return closest

    def release(self, slots: Iterable[SlotFile]) -> None:
        """Remove the slots. Their memory is free once no process maps it."""
        for slot in tuple(slots):
            with self._lock:
                self._slots.remove(slot)
            slot.remove()

    def close(self) -> None:
        self.release(self.slots)

    def _allocate(self, num_bytes: int) -> SlotFile:
        with self._lock:
            self._num_allocated += 1
            path = self._directory / f"{self._kind}-{self._num_allocated}"
        slot = self._with_room(lambda: SlotFile(path, num_bytes))
        with self._lock:
            self._slots.append(slot)
        return slot

    def _with_room(self, allocate: Callable[[], T]) -> T:
        try:
            return allocate()
        except SharedMemoryFull:
            if self._make_room is None or not self._make_room():
                raise
            return allocate()


def fitting(slots: Iterable[SlotFile], num_bytes: int) -> list[SlotFile]:
    """Return those that are large enough for `num_bytes`, and not wastefully large; in the given order."""
    return [slot for slot in slots if slot.fits(num_bytes)]
