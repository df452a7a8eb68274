"""Shared memory that holds a run's tensors while it trains: a snapshot after every step, without a copy.

    slot 0   complete: step 4 | begin | the optimizer writes step 6 | finish | complete: step 6 ...
    slot 1   complete: step 5 .............................................. | begin | step 7 ...

All ranks vote before each update. When a rank begins to write step 6, step 5 is therefore complete on every rank: if a
process is killed at any moment, one step is complete on all ranks, and it is at most one step old.

Besides the two slots of the current model, the slot that the group was restored from stays until the group has a
complete snapshot of its own. Called by the engine's double-buffered state, from the training thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from shoal_workers.checkpoint.save_plan import SavePlan
from shoal_workers.snapshot_store.errors import SharedMemoryFull
from shoal_workers.snapshot_store.slots import retention
from shoal_workers.snapshot_store.slots.pool import SlotPool, at, fitting
from shoal_workers.snapshot_store.slots.shape import Shape, view_of
from shoal_workers.snapshot_store.slots.slot import SlotFile, Stamp


class LiveSlot:
    """One of the two. The owner of the tensors in it calls `begin` before it changes them, and `finish` afterwards."""

    def __init__(self, file: SlotFile, shape: Shape) -> None:
        self._file = file
        self._shape = shape
        self._payload = shape.lay_out(file)
        self._items = {item.fqn: item for item in shape.plan.items}

    @property
    def plan(self) -> SavePlan:
        return self._shape.plan

    def view(self, fqn: str) -> torch.Tensor:
        """The item, with its dtype and sizes."""
        return view_of(self._payload, self._items[fqn])

    def room(self, fqn: str, num_bytes: int) -> torch.Tensor:
        """The item's bytes and, if `with_rooms` reserved more for it, the bytes that follow; uint8."""
        start = self._items[fqn].file_offset
        return self._payload[start : start + num_bytes]

    def is_of(self, generation: int, step: int) -> bool:
        """It holds the complete state of this generation after this step."""
        header = self._file.header
        return header is not None and (header.generation, header.step) == (generation, step)

    def begin(self) -> None:
        """From here until `finish`, readers do not accept its content as a part."""
        self._file.begin()

    def finish(self, stamp: Stamp, extra_json: bytes) -> bool:
        """It holds the state that the stamp names. False: `extra_json` is too long; the part stays incomplete."""
        file, regions = self._file, self._shape.regions
        if len(extra_json) > regions.extra_room:
            return False
        file.begin()
        file.map[regions.extra_offset : regions.extra_offset + len(extra_json)] = extra_json
        file.finish(regions, stamp, num_extra_bytes=len(extra_json))
        return True


class LiveSlots:
    """The live slots of one process, over all its generations."""

    def __init__(self, directory: Path, make_room: Callable[[], bool] | None = None) -> None:
        self._pool = SlotPool(directory, "own-live", make_room)
        self._current: list[SlotFile] = []
        self._restored: tuple[int, int] | None = None

    def make(self, plan: SavePlan, *, extra_bytes: int) -> tuple[LiveSlot, ...]:
        """Two slots for a new model. The tensors of earlier models are no longer in use. SharedMemoryFull."""
        shape = Shape.of(plan, extra_bytes=extra_bytes)
        num_bytes = shape.regions.file_bytes
        slots = self._pool.slots
        free = at(slots, retention.reusable_live([slot.header for slot in slots], restored=self._restored))
        self._current = fitting(free, num_bytes)[: retention.NUM_LIVE_SLOTS]
        self._pool.release(slot for slot in free if slot not in self._current)
        try:
            while len(self._current) < retention.NUM_LIVE_SLOTS:
                self._current.append(self._pool.allocate(num_bytes))
        except SharedMemoryFull:
            self._pool.release(self._current)
            self._current = []
            raise
        for slot in self._current:
            slot.begin()
        return tuple(LiveSlot(slot, shape) for slot in self._current)

    def keep_restored(self, generation: int, step: int) -> None:
        """The group was restored from this snapshot; it stays until `drop_older`."""
        self._restored = generation, step

    def drop_older(self, generation: int) -> None:
        """Removes the slots of earlier generations, except the two of the current model."""
        self._pool.release(
            slot
            for slot in self._pool.slots
            if slot not in self._current and retention.is_outdated(slot.header, before=generation)
        )

    def close(self) -> None:
        self._pool.close()
