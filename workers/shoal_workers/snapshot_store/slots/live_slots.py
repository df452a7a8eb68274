"""Shared memory that holds a run's tensors while it trains: a snapshot after every step, without a copy.

    slot 0   complete: step 4 | begin | the optimizer writes step 6 | finish | complete: step 6 ...
    slot 1   complete: step 5 .............................................. | begin | step 7 ...

All ranks vote before each update. When a rank begins to write step 6, step 5 is therefore complete on every rank: if a
process is killed at any moment, one step is complete on all ranks, and it is at most one step old.

A change of layout, or a restore from memory, takes the slots over. The new state is read straight into the slot that
the old state was not in; the first update overwrites the slot that was read:

    slot 0   complete: (3, 40), read by all ranks ..................... | begin | the first update writes (4, 41)
    slot 1   (3, 39) | begin | (3, 40) is read from all ranks' slots | finish | complete: (4, 40) ...

If copies of (3, 40) on other nodes may still be needed, or not every rank holds (4, 40), slot 0 stays until the group
has newer snapshots, and the first update writes a third slot. Called by the engine's double-buffered state, from the
training thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from shoal_workers.checkpoint.save_plan import SavePlan
from shoal_workers.snapshot_store.slots import retention
from shoal_workers.snapshot_store.slots.own_slots import Shape, view_item
from shoal_workers.snapshot_store.slots.slot_files import SlotFile, SlotPool, Stamp
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull

_log = logging.getLogger(__name__)


class LiveSlot:
    """One of the two. The owner of the tensors in it calls `begin` before it changes them, and `finish` afterwards."""

    def __init__(self, file: SlotFile, shape: Shape) -> None:
        self.file = file
        self._shape = shape
        self._payload = shape.lay_out(file)
        self._items = {item.fqn: item for item in shape.plan.items}
        self._held = self._wanted = frozenset(self._items)

    @property
    def plan(self) -> SavePlan:
        return self._shape.plan

    def view(self, fqn: str) -> torch.Tensor:
        """Return the item, with its dtype and sizes."""
        return view_item(self._payload, self._items[fqn])

    def room(self, fqn: str, num_bytes: int) -> torch.Tensor:
        """Return the item's bytes and, if `with_rooms` reserved more for it, the bytes that follow; uint8."""
        start = self._items[fqn].file_offset
        return self._payload[start : start + num_bytes]

    def is_of(self, generation: int, step: int) -> bool:
        """Return whether it holds the complete state of this generation after this step."""
        return self.file.is_of(generation, step)

    @property
    def held(self) -> frozenset[str]:
        """Names of the items of which the last part consists."""
        return self._held

    def hold(self, names: frozenset[str]) -> None:
        """From the next `finish` on, a part consists of these of the items; the others keep their room."""
        self._wanted = names & self._items.keys()

    def begin(self) -> None:
        """From here until `finish`, readers do not accept its content as a part."""
        self.file.begin()

    def finish(self, stamp: Stamp, extra_json: bytes) -> bool:
        """Declare that it holds the state that the stamp names. Return False if `extra_json` is too long; the part
        stays incomplete."""
        file, regions = self.file, self._shape.regions
        if len(extra_json) > regions.extra_room:
            return False
        file.begin()
        if self._held != self._wanted:
            index = self._shape.make_index(self._wanted)
            file.map[regions.index_offset : regions.index_offset + len(index)] = index
            self._held = self._wanted
        file.map[regions.extra_offset : regions.extra_offset + len(extra_json)] = extra_json
        file.finish(regions, stamp, num_extra_bytes=len(extra_json))
        return True


class LiveSlots:
    """The live slots of one process, over all its generations."""

    def __init__(self, directory: Path, make_room: Callable[[], bool] | None = None) -> None:
        self._pool = SlotPool(directory, "own-live", make_room)
        self._shape: Shape | None = None
        self._current: list[SlotFile] = []
        """The first slot of the current model, and the second once it is made."""
        self._next: SlotFile | None = None
        """Has memory for the second slot; it may hold what the group was restored from."""
        self._num_slots = retention.NUM_LIVE_SLOTS
        """Slots that stay allocated: one more once a third was needed."""
        self._restored: tuple[int, int] | None = None

    def make(self, plan: SavePlan, *, extra_bytes: int, restoring: tuple[int, int] | None = None) -> LiveSlot:
        """Return the first slot of a new model, and memory for the second.

        The tensors of earlier models are no longer in use. `restoring`: (generation, step) of the snapshot that the
        group is about to read; it stays complete. SharedMemoryFull.
        """
        self._shape = Shape.from_plan(plan, extra_bytes=extra_bytes)
        slots = self._pool.slots
        restored = self._restored if restoring is None else restoring
        free = retention.reusable_live(slots, restored=restored)
        complete = [slot for slot in slots if slot not in free]
        self._current, self._next = [], None
        try:
            first = self._pool.take(free, self._num_bytes)
            first.begin()
            if complete:
                self._next = complete[0]
                self._next.grow(self._num_bytes)  # not `take`: the part that the group will read stays complete
            else:
                self._next = self._pool.take((slot for slot in free if slot is not first), self._num_bytes)
        except SharedMemoryFull:
            self._pool.release(slot for slot in self._pool.slots if slot not in complete)
            self._next = None
            raise
        self._current = [first]
        return LiveSlot(first, self._shape)

    def make_anew(self, slot: LiveSlot, plan: SavePlan, *, extra_bytes: int) -> LiveSlot:
        """`slot`, the current one, in another layout. The other slot, complete or not, keeps what it holds; it gets the
        layout when it becomes the second slot. SharedMemoryFull: as before, but `slot` holds no part."""
        (other,) = (used for used in self._used if used is not slot.file)
        shape = Shape.from_plan(plan, extra_bytes=extra_bytes)
        slot.file.begin()
        slot.file.grow(shape.regions.file_bytes)
        # The other slot grows now, so that it needs no memory when it becomes the second slot.
        other.grow(shape.regions.file_bytes)
        self._shape, self._current, self._next = shape, [slot.file], other
        return LiveSlot(slot.file, shape)

    def make_second(self, *, keep_restored: bool) -> LiveSlot:
        """Return the second slot, once every rank has read what it needs, and before the first update.

        `keep_restored`: what the group was restored from stays until `drop_older`, if there is memory for a third slot.
        """
        assert self._shape is not None and self._next is not None
        second = self._next
        if keep_restored and self._restored is not None and second.is_of(*self._restored):
            try:
                free = [slot for slot in self._pool.slots if slot not in (*self._current, second)]
                second = self._pool.take(free, self._num_bytes)
                self._num_slots = retention.NUM_LIVE_SLOTS + 1
            except SharedMemoryFull as error:
                _log.warning("live_slots.no_third_slot", extra={"error": str(error)})
        if second.is_wasteful(self._num_bytes):
            second.resize(self._num_bytes)
        second.begin()
        self._current.append(second)
        self._next = None
        return LiveSlot(second, self._shape)

    @property
    def files(self) -> tuple[SlotFile, ...]:
        """All slots that have memory, mapped."""
        return self._pool.slots

    def keep_restored(self, generation: int, step: int) -> None:
        """Keep the snapshot that the group was restored from until `drop_older`."""
        self._restored = generation, step

    def drop_older(self, generation: int) -> None:
        """Drop the snapshots of earlier generations, except the slots of the current model. If that needed a third
        slot, one more stays allocated for the next change of layout."""
        used = self._used
        spare = [
            slot
            for slot in self._pool.slots
            if slot not in used and retention.is_outdated(slot.header, before=generation)
        ]
        num_kept = max(0, self._num_slots - len(used))
        for slot in spare[:num_kept]:
            slot.begin()
            if self._shape is not None and slot.is_wasteful(self._num_bytes):
                slot.resize(self._num_bytes)
        self._pool.release(spare[num_kept:])

    def close(self) -> None:
        self._pool.close()

    @property
    def _used(self) -> list[SlotFile]:
        """The slots of the current model."""
        return [*self._current, *([] if self._next is None else [self._next])]

    @property
    def _num_bytes(self) -> int:
        assert self._shape is not None
        return self._shape.regions.file_bytes
