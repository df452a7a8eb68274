"""The slot pool: makes, finds and removes the slots of one kind ("own", "own-live", "buddy" or "log") of this process.

The kinds of slots use one pool each. `retention` decides which slots may be overwritten; the pool picks among
them the one that has the right size. A slot never changes its size: if it is too small, it is removed and a larger one
is allocated.

Thread-safe: `allocate` takes and touches memory, which is slow, so it holds the lock only to number and to list the
slot. Its callers' own locks order what they decide about the slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from shoal_workers.snapshot_store.errors import SharedMemoryFull
from shoal_workers.snapshot_store.slots.slot import SlotFile


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

    def allocate(self, num_bytes: int) -> SlotFile:
        """A new slot of this capacity, touched, with no part in it. SharedMemoryFull."""
        with self._lock:
            self._num_allocated += 1
            path = self._directory / f"{self._kind}-{self._num_allocated}"
        try:
            slot = SlotFile(path, num_bytes)
        except SharedMemoryFull:
            if self._make_room is None or not self._make_room():
                raise
            slot = SlotFile(path, num_bytes)
        with self._lock:
            self._slots.append(slot)
        return slot

    def release(self, slots: Iterable[SlotFile]) -> None:
        """Removes the slots. Their memory is free once no process maps it."""
        for slot in tuple(slots):
            with self._lock:
                self._slots.remove(slot)
            slot.remove()

    def close(self) -> None:
        self.release(self.slots)


def fitting(slots: Iterable[SlotFile], num_bytes: int) -> list[SlotFile]:
    """Those that are large enough for `num_bytes`, and not wastefully large; in the given order."""
    return [slot for slot in slots if slot.fits(num_bytes)]


def not_fitting(slots: Iterable[SlotFile], num_bytes: int) -> list[SlotFile]:
    return [slot for slot in slots if not slot.fits(num_bytes)]


def at(slots: Sequence[SlotFile], positions: Iterable[int]) -> list[SlotFile]:
    """The slots at the positions that a retention decision returned."""
    return [slots[position] for position in positions]
