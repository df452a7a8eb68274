"""The slot pool: makes, takes over and removes this process's slots of one kind ("own", "own-live", "buddy" or "log").

The kinds of slots use one pool each. `retention` decides which slots may be overwritten; the pool takes over the one
among them whose size is right, or closest: a slot that is too small grows, and one of more than twice the size gives
memory back (`SlotFile.fits`). Its other pages are warm, which makes it 10 to 25 times as fast as a new slot.

Thread-safe: `allocate` and `take_over` may take and touch memory, which is slow, so they hold the lock only to number
and to list the slot. Their callers' own locks order what they decide about the slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from shoal_workers.snapshot_store.slots.slot import SlotFile
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull

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

    def allocate(self, num_bytes: int) -> SlotFile:
        """A new slot of this capacity, touched, with no part in it. SharedMemoryFull."""
        with self._lock:
            self._num_allocated += 1
            path = self._directory / f"{self._kind}-{self._num_allocated}"
        slot = self._with_room(lambda: SlotFile(path, num_bytes))
        with self._lock:
            self._slots.append(slot)
        return slot

    def take_over(self, free: Iterable[SlotFile], num_bytes: int, *, headroom_bytes: int = 0) -> SlotFile | None:
        """One of these slots, which may be overwritten: the first that fits, else the closest in size, which is
        resized with the headroom and holds no part afterwards. None: there is none.

        If there is no room, the others of these slots are removed for it. SharedMemoryFull."""
        candidates = list(free)
        slot = next((one for one in candidates if one.fits(num_bytes)), None)
        if slot is not None or not candidates:
            return slot
        closest = min(candidates, key=lambda one: abs(one.capacity_bytes - num_bytes))
        try:
            self._with_room(lambda: closest.resize(num_bytes + headroom_bytes))
        except SharedMemoryFull:
            if len(candidates) == 1:
                raise
            self.release(one for one in candidates if one is not closest)
            closest.resize(num_bytes + headroom_bytes)
        return closest

    def release(self, slots: Iterable[SlotFile]) -> None:
        """Removes the slots. Their memory is free once no process maps it."""
        for slot in tuple(slots):
            with self._lock:
                self._slots.remove(slot)
            slot.remove()

    def close(self) -> None:
        self.release(self.slots)

    def _with_room(self, allocate: Callable[[], T]) -> T:
        try:
            return allocate()
        except SharedMemoryFull:
            if self._make_room is None or not self._make_room():
                raise
            return allocate()


def fitting(slots: Iterable[SlotFile], num_bytes: int) -> list[SlotFile]:
    """Those that are large enough for `num_bytes`, and not wastefully large; in the given order."""
    return [slot for slot in slots if slot.fits(num_bytes)]


def at(slots: Sequence[SlotFile], positions: Iterable[int]) -> list[SlotFile]:
    """The slots at the positions that a retention decision returned."""
    return [slots[position] for position in positions]
