"""The slots in which this process keeps the copies that processes of other nodes send; `retention` decides which may be
overwritten.

A copy of a generation that the group has dropped is refused: a worker that was cut off may still be sending.
Called from the server's threads and from the training thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from shoal_workers.snapshot_store.slots import retention
from shoal_workers.snapshot_store.slots.slot_files import Regions, SlotFile, SlotPool

_HEADROOM_BYTES = 64 << 10
"""A new slot is larger by this much, so that a copy whose plain values are a few digits longer still fits."""


class OutdatedCopy(Exception):
    """The sender belongs to a generation whose copies were dropped."""


class BuddySlots:
    def __init__(self, directory: Path, make_room: Callable[[], bool] | None = None) -> None:
        self._pool = SlotPool(directory, "buddy", make_room)
        self._lock = threading.Lock()
        self._receiving: set[SlotFile] = set()
        self._oldest_generation = 0

    def acquire(self, regions: Regions, *, generation: int, rank: int, keep_step: int | None = None) -> SlotFile:
        """A slot to receive a copy in. It holds no part until the caller calls its `finish`; `release` it in any case.

        `keep_step`: the copy of this step is not overwritten, even if it is the older one.

        SharedMemoryFull if there is no room; OutdatedCopy if copies of this generation were dropped.
        """
        with self._lock:
            if generation < self._oldest_generation:
                raise OutdatedCopy(
                    f"generation {generation} is over: copies before generation {self._oldest_generation} were dropped"
                )
            free = retention.reusable_for_copy(self._idle(), generation=generation, rank=rank, keep_step=keep_step)
            slot = self._pool.take(free, regions.file_bytes, headroom_bytes=_HEADROOM_BYTES)
            self._receiving.add(slot)
        slot.begin()
        return slot

    def release(self, slot: SlotFile) -> None:
        """Give a slot back, once the copy in it is complete or was broken off."""
        with self._lock:
            self._receiving.discard(slot)
            if slot.header is not None and slot.header.generation < self._oldest_generation:
                slot.begin()  # its generation was dropped while the copy was received

    def drop_older(self, generation: int) -> None:
        """Drop copies of earlier generations, and refuse new ones."""
        with self._lock:
            self._oldest_generation = max(self._oldest_generation, generation)
            idle = self._idle()
            for slot in idle:
                if slot.header is not None and retention.is_outdated(slot.header, before=generation):
                    slot.begin()
            self._pool.release(retention.surplus_empty(idle))

    def close(self) -> None:
        """Called after all threads of the server have ended."""
        with self._lock:
            self._pool.close()

    def _idle(self) -> list[SlotFile]:
        return [slot for slot in self._pool.slots if slot not in self._receiving]
