"""The slots in which this process keeps copies for processes of other nodes.

Of each rank of each generation the two newest copies: the one before the newest is overwritten, so that a sender that
dies in the middle leaves the newest whole. Older generations are kept until they are forgotten, since the group may be
restoring from them. Called from the server's threads and from the training thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from shoal_workers.snapshot_store.requests import Part
from shoal_workers.snapshot_store.slot import Regions, SlotFile

_COPIES = 2
_HEADROOM_BYTES = 64 << 10
"""So that plain values that grow by a digit still fit."""
_SPARE = 2
"""Slots without content that are kept warm for the senders of the next generation."""


class StalePut(Exception):
    """The sender is of a generation that is over."""


class BuddySlots:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._slots: list[SlotFile] = []
        self._busy: set[SlotFile] = set()
        self._num_made = 0
        self._oldest = 0

    def take(self, part: Part, regions: Regions) -> SlotFile:
        """A slot to receive a copy in, not complete until the caller says so; give it back in any case.

        SharedMemoryFull where there is no room; StalePut for a generation that was forgotten.
        """
        with self._lock:
            if part.generation < self._oldest:
                raise StalePut(f"generation {part.generation} is over")
            slot = self._reusable(part, regions.file_bytes) or self._new(regions.file_bytes)
            self._busy.add(slot)
        slot.begin()
        return slot

    def give_back(self, slot: SlotFile) -> None:
        with self._lock:
            self._busy.discard(slot)
            if slot.header is not None and slot.header.generation < self._oldest:  # forgotten while it was received
                slot.begin()

    def forget_older(self, generation: int) -> None:
        """Copies of generations before this one are gone, and none of them is taken any more."""
        with self._lock:
            self._oldest = max(self._oldest, generation)
            for slot in self._slots:
                if slot not in self._busy and slot.header is not None and slot.header.generation < generation:
                    slot.begin()
            self._remove([slot for slot in self._slots if slot not in self._busy and slot.header is None][_SPARE:])

    def close(self) -> None:
        """No thread of the server is left."""
        with self._lock:
            self._remove(list(self._slots))

    def _reusable(self, part: Part, needed_bytes: int) -> SlotFile | None:
        idle = [slot for slot in self._slots if slot not in self._busy]
        copies = [
            (slot.header.step, slot)
            for slot in idle
            if slot.header is not None and (slot.header.generation, slot.header.rank) == (part.generation, part.rank)
        ]
        copies.sort(key=lambda copy: copy[0])
        over = [slot for _, slot in copies[: len(copies) + 1 - _COPIES]]
        free = over + [slot for slot in idle if slot.header is None]
        misfits = [slot for slot in free if not slot.fits(needed_bytes)]
        self._remove(misfits)
        return next((slot for slot in free if slot not in misfits), None)

    def _new(self, needed_bytes: int) -> SlotFile:
        self._num_made += 1
        slot = SlotFile(self._directory / f"buddy-{self._num_made}", needed_bytes + _HEADROOM_BYTES)
        self._slots.append(slot)
        return slot

    def _remove(self, slots: Iterable[SlotFile]) -> None:
        for slot in slots:
            self._slots.remove(slot)
            slot.remove()
