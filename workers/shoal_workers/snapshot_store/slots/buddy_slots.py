"""The slots in which this process keeps what processes of other nodes send: whole copies, and log entries between them.

    BuddySlots   copies; `retention` decides which may be overwritten
    EntrySlots   a ring of log entries for each rank; a newer whole copy makes an entry unnecessary, and it may then be
                 overwritten

Both refuse what belongs to a generation that the group has dropped: a worker that was cut off may still be sending.
Called from the server's threads and from the training thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal_workers.snapshot_store.slots import retention
from shoal_workers.snapshot_store.slots.slot_files import Regions, SlotFile, SlotPool, at
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull

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
            self._refuse_outdated(generation)
            slot = self._of_size(self._reusable(generation, rank, keep_step), regions.file_bytes)
            self._receiving.add(slot)
        slot.begin()
        return slot

    def acquire_another(self, regions: Regions, *, generation: int, rank: int, keep_step: int) -> SlotFile:
        """Acquires a slot as `acquire` does, but overwrites an older copy of this rank only if there is no room for
        another one."""
        with self._lock:
            self._refuse_outdated(generation)
            empty = [slot for slot in self._idle() if slot.header is None]
            slot = None
            with suppress(SharedMemoryFull):
                slot = self._of_size(empty, regions.file_bytes)
            if slot is not None:
                self._receiving.add(slot)
                slot.begin()
                return slot
        return self.acquire(regions, generation=generation, rank=rank, keep_step=keep_step)

    def release(self, slot: SlotFile) -> None:
        """Gives a slot back, once the copy in it is complete or was broken off."""
        with self._lock:
            self._receiving.discard(slot)
            if slot.header is not None and slot.header.generation < self._oldest_generation:
                slot.begin()  # its generation was dropped while the copy was received

    def drop_older(self, generation: int) -> None:
        """Drops copies of earlier generations, and refuses new ones."""
        with self._lock:
            self._oldest_generation = max(self._oldest_generation, generation)
            idle = self._idle()
            for slot in idle:
                if slot.header is not None and retention.is_outdated(slot.header, before=generation):
                    slot.begin()
            self._pool.release(at(idle, retention.surplus_empty([slot.header for slot in idle])))

    def close(self) -> None:
        """Called after all threads of the server have ended."""
        with self._lock:
            self._pool.close()

    def newest_step(self, generation: int, rank: int) -> int | None:
        """The newest step of the copies of this rank."""
        headers = [slot.header for slot in self._pool.slots]
        steps = [h.step for h in headers if h is not None and (h.generation, h.rank) == (generation, rank)]
        return max(steps, default=None)

    def _refuse_outdated(self, generation: int) -> None:
        if generation < self._oldest_generation:
            raise OutdatedCopy(
                f"generation {generation} is over: copies before generation {self._oldest_generation} were dropped"
            )

    def _of_size(self, free: list[SlotFile], num_bytes: int) -> SlotFile:
        """Returns one of these, or a new one. SharedMemoryFull."""
        slot = self._pool.take_over(free, num_bytes, headroom_bytes=_HEADROOM_BYTES)
        return self._pool.allocate(num_bytes + _HEADROOM_BYTES) if slot is None else slot

    def _reusable(self, generation: int, rank: int, keep_step: int | None) -> list[SlotFile]:
        idle = self._idle()
        headers = [slot.header for slot in idle]
        return at(idle, retention.reusable_for_copy(headers, generation=generation, rank=rank, keep_step=keep_step))

    def _idle(self) -> list[SlotFile]:
        return [slot for slot in self._pool.slots if slot not in self._receiving]


STEPS_PER_COPY = 20
"""Steps between two whole copies while a log is kept. A copy has three times the size of the gradients, so the buddy
gets 1 + 3/20 = 1.15 times their volume; 10 would be 1.3 times. A replay takes at most this many steps and some more."""
MAX_ENTRIES = STEPS_PER_COPY + 8
"""Entries of one rank. The next whole copy takes some steps to arrive, and the step before it may be wanted."""


class EntrySlots:
    def __init__(self, directory: Path) -> None:
        self._pool = SlotPool(directory, "log")
        self._lock = threading.Lock()
        self._receiving: set[SlotFile] = set()
        self._oldest_generation = 0

    def acquire(self, regions: Regions, *, generation: int, rank: int, newest_copy: int | None) -> SlotFile | None:
        """A slot for the next entry of this rank; `newest_copy`: step of its newest whole copy here.

        It holds no entry until the caller calls its `finish`; `release` it in any case. None if no entry may be
        overwritten, and there is no room for another one. OutdatedCopy if entries of this generation were dropped.
        """
        with self._lock:
            self._refuse_outdated(generation)
            idle = [slot for slot in self._pool.slots if slot not in self._receiving]
            headers = [slot.header for slot in idle]
            free = at(
                idle, retention.reusable_for_entry(headers, generation=generation, rank=rank, newest_copy=newest_copy)
            )
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
        """Gives a slot back, once the entry in it is complete or was broken off."""
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
        """Return whether the entries of this generation were dropped."""
        return generation < self._oldest_generation

    def close(self) -> None:
        """Called after all threads of the server have ended."""
        with self._lock:
            self._pool.close()

    def _refuse_outdated(self, generation: int) -> None:
        if generation < self._oldest_generation:
            raise OutdatedCopy(
                f"generation {generation} is over: entries before generation {self._oldest_generation} were dropped"
            )
