"""The slots in which this process keeps log entries for processes of other nodes: a ring for each rank.

An entry may be overwritten once a newer whole copy makes it unnecessary. Called from the server's threads and from the
training thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from shoal_workers.snapshot_store.slots.buddy_slots import OutdatedCopy
from shoal_workers.snapshot_store.slots.pool import SlotPool, at
from shoal_workers.snapshot_store.slots.slot import PartHeader, Regions, SlotFile
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull

STEPS_PER_COPY = 20
"""Steps between two whole copies while a log is kept. A copy has three times the size of the gradients, so the buddy
gets 1 + 3/20 = 1.15 times their volume; 10 would be 1.3 times. A replay takes at most this many steps and some more."""
MAX_ENTRIES = STEPS_PER_COPY + 8
"""Entries of one rank. The next whole copy takes some steps to arrive, and the step before it may be wanted."""
_STEPS_BEFORE_COPY = 2
"""Entries up to this many steps before the newest whole copy stay: the group may go back to one of these steps."""
_SPARE_SLOTS = 2


class EntrySlots:
    def __init__(self, directory: Path) -> None:
        self._pool = SlotPool(directory, "log")
        self._lock = threading.Lock()
        self._receiving: set[SlotFile] = set()
        self._oldest_generation = 0

    def acquire(self, regions: Regions, *, generation: int, rank: int, newest_copy: int | None) -> SlotFile | None:
        """A slot for the next entry of this rank; `newest_copy`: step of its newest whole copy here.

        It holds no entry until the caller calls its `finish`; `release` it in any case. None: no entry may be
        overwritten, and there is no room for another one. OutdatedCopy if entries of this generation were dropped.
        """
        with self._lock:
            self._refuse_outdated(generation)
            idle = [slot for slot in self._pool.slots if slot not in self._receiving]
            headers = [slot.header for slot in idle]
            free = at(idle, reusable(headers, generation=generation, rank=rank, newest_copy=newest_copy))
            num_held = sum(
                header is not None and (header.generation, header.rank) == (generation, rank) for header in headers
            )
            try:
                slot = self._pool.take_over(free, regions.file_bytes)
                if slot is None and num_held < MAX_ENTRIES:
                    slot = self._pool.allocate(regions.file_bytes)
            except SharedMemoryFull:
                return None
            if slot is None:
                return None
            self._receiving.add(slot)
        slot.begin()
        return slot

    def release(self, slot: SlotFile) -> None:
        """The entry is complete, or was broken off."""
        with self._lock:
            self._receiving.discard(slot)
            if slot.header is not None and slot.header.generation < self._oldest_generation:
                slot.begin()  # its generation was dropped while the entry was received

    def drop_older(self, generation: int) -> None:
        """Drops entries of earlier generations, and refuses new ones."""
        with self._lock:
            self._oldest_generation = max(self._oldest_generation, generation)
            for slot in self._pool.slots:
                if slot not in self._receiving and slot.header is not None and slot.header.generation < generation:
                    slot.begin()

    def is_outdated(self, generation: int) -> bool:
        """Entries of this generation were dropped."""
        return generation < self._oldest_generation

    def free_unused(self) -> None:
        """Removes the empty slots but a few: their memory may be needed for something else."""
        with self._lock:
            empty = [slot for slot in self._pool.slots if slot.header is None and slot not in self._receiving]
            self._pool.release(empty[_SPARE_SLOTS:])

    def close(self) -> None:
        """Called after all threads of the server have ended."""
        with self._lock:
            self._pool.close()

    def _refuse_outdated(self, generation: int) -> None:
        if generation < self._oldest_generation:
            raise OutdatedCopy(
                f"generation {generation} is over: entries before generation {self._oldest_generation} were dropped"
            )


def reusable(headers: Sequence[PartHeader | None], *, generation: int, rank: int, newest_copy: int | None) -> list[int]:
    """Positions that may hold the next entry of this rank: empty ones, then its own oldest unnecessary entry."""
    empty = [position for position, header in enumerate(headers) if header is None]
    if newest_copy is None:
        return empty
    unnecessary = [
        (header.step, position)
        for position, header in enumerate(headers)
        if header is not None
        and (header.generation, header.rank) == (generation, rank)
        and header.step < newest_copy - _STEPS_BEFORE_COPY
    ]
    return empty + [position for _, position in sorted(unnecessary)]
