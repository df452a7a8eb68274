"""Maps of the live slots of the other processes of this memory, made while training, so that a restore only copies.

    training       ... | older snapshots are freed | step | step .......... | yield | restore: copies | step ...
    thread here                                           | map, populate | 5 s | check | 5 s | check ...

The first access to a page of a map costs more than to copy the page, and reading the file with `preadv` takes more than
twice as long as to copy from a map whose pages are present. Maps take no memory of their own but for page tables (0.2 %
of what they show). They stay over changes of layout, because slots are taken over. A map keeps the memory of a file
that was removed, so such maps are dropped within CHECK_S. Called by the snapshot store; imports no torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from shoal_workers.descriptors import close_after
from shoal_workers.snapshot_store.slots.registry import SlotRegistry
from shoal_workers.snapshot_store.slots.slot_files import SlotFile

CHECK_S = 5.0
"""Longest time for which the memory of a removed file is kept."""
MOST_BYTES = 64 << 30
"""The limit for all maps; their page tables take 128 MiB then, and the thread some seconds. Other slots are read as
files."""
MOST_MAPS = 128
"""Each holds a file descriptor."""
_MADV_POPULATE_READ = 22
_CHUNK_BYTES = 8 << 20
"""Takes less than a millisecond, in which no other thread of this process can make or remove a mapping."""
_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""

_FileId = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True, slots=True)
class _Mapped:
    path: Path
    memory: mmap.mmap


class PeerMaps:
    """The other methods are called from any thread; a thread of its own, which `map_ahead` starts, makes the maps."""

    def __init__(self, registry: SlotRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        """Guards all that follows; held briefly."""
        self._changed = threading.Condition(self._lock)
        self._maps: dict[_FileId, _Mapped] = {}
        self._is_wanted = False
        """`map_ahead` was called, and not all is mapped yet."""
        self._num_drops = 0
        """What an older pass maps is not kept."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of all maps: they count as resident memory of this process, but belong to others."""
        with self._lock:
            return sum(len(mapped.memory) for mapped in self._maps.values())

    def map_ahead(self) -> None:
        """Have all live slots of other processes mapped soon, for the next load. Does not wait. Called once per
        generation, in the step after `drop_older`, when the slots of no process change their sizes any more."""
        with self._changed:
            self._is_wanted = not self._is_closed
            self._changed.notify_all()
            if self._thread is None and self._is_wanted:
                self._thread = threading.Thread(target=self._run, name="snapshot-maps", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether what `map_ahead` began is done within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_wanted, timeout_s)

    def find(self, fd: int, num_bytes: int, own: Iterable[SlotFile]) -> mmap.mmap | None:
        """A map of at least this many bytes of the open file, whose pages are present: of one of this process's `own`
        slots, or of another process's that was mapped ahead. None if there is none."""
        place = _id(os.fstat(fd))
        for slot in own:
            if _is_at(slot.path, place):
                return slot.map if len(slot.map) >= num_bytes else None
        with self._lock:
            mapped = self._maps.get(place)
        return mapped.memory if mapped is not None and len(mapped.memory) >= num_bytes else None

    def drop(self) -> bool:
        """Unmap everything, and what is being mapped. Returns whether there was a map."""
        with self._changed:
            dropped, self._maps = self._maps, {}
            self._num_drops += 1
            self._is_wanted = False
            self._changed.notify_all()
        return bool(dropped)

    def close(self) -> None:
        """Return when the thread has ended."""
        self._is_closed = True
        self.drop()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            with self._changed:
                is_wanted, num_drops = self._is_wanted, self._num_drops
            if is_wanted:
                self._map_all(num_drops)
            self._drop_removed()
            with self._changed:
                if is_wanted and num_drops == self._num_drops:
                    self._is_wanted = False
                    self._changed.notify_all()
                timeout_s = CHECK_S if self._maps else None
                self._changed.wait_for(lambda: self._is_wanted or self._is_closed, timeout_s)

    def _map_all(self, num_drops: int) -> None:
        num_bytes = 0
        for path in islice(self._registry.live_slots_of_others(), MOST_MAPS):
            with suppress(OSError):  # it was removed, or there is no memory for page tables: it is read as a file
                with close_after(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
                    num_bytes += self._map(path, fd, num_drops, MOST_BYTES - num_bytes)

    def _map(self, path: Path, fd: int, num_drops: int, most_bytes: int) -> int:
        """Map only what has memory: to touch what a file has given back would allocate it again."""
        status = os.fstat(fd)
        length = min(status.st_size, status.st_blocks * _BLOCK_BYTES)
        known = self._maps.get(_id(status))
        if not 0 < length <= most_bytes:
            return 0
        if known is not None and len(known.memory) == length:
            return length
        memory = mmap.mmap(fd, length, prot=mmap.PROT_READ)
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        for start in range(0, length, _CHUNK_BYTES):
            if self._num_drops != num_drops:
                return 0
            _populate(address + start, min(_CHUNK_BYTES, length - start))
        with self._lock:
            if self._num_drops == num_drops:
                self._maps[_id(status)] = _Mapped(path, memory)
        return length

    def _drop_removed(self) -> None:
        with self._lock:
            maps = dict(self._maps)
        removed = {place for place, mapped in maps.items() if not _is_at(mapped.path, place)}
        if removed:
            with self._lock:
                self._maps = {place: mapped for place, mapped in self._maps.items() if place not in removed}


def _populate(address: int, num_bytes: int) -> None:
    """Find the pages without the interpreter's lock. A kernel before 5.14 refuses; then they are found when they are
    read."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_READ)


def _id(status: os.stat_result) -> _FileId:
    return status.st_dev, status.st_ino


def _is_at(path: Path, place: _FileId) -> bool:
    try:
        return _id(path.stat()) == place
    except OSError:
        return False
