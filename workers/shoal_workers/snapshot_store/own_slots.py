"""A process's own snapshots: a blocking copy into warm shared memory, at the speed of memcpy.

    slots   as a rule two: the newest complete one stays, the other is written
            with a buddy up to four: also the one that is being sent and the last that the buddy has, because after the
            loss of a node the group goes back to a step of which every lost part has a copy and every living part a
            slot; such a slot is given up only where there is no memory for another

What depends on the state's layout only (the plan, its index as JSON, the tensor views of a slot) is made once and found
again by `plan_key`; a snapshot then costs one pass over the tensors. Called from the training thread; the sender thread
calls `sent`. Copies from CUDA go without blocking, followed by one synchronize.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.save_plan import SavePlan, plan_key, plan_save
from shoal_workers.snapshot_store.errors import SharedMemoryFull
from shoal_workers.snapshot_store.slot import SlotFile, Stamp
from shoal_workers.snapshot_store.slot_choice import kept, oldest_first
from shoal_workers.snapshot_store.slot_shape import Shape, view_of

_NUM_SLOTS = 2

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OwnSlot:
    """A slot, and the tensors over it."""

    file: SlotFile
    shape: Shape | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    """Of the views."""


class OwnSlots:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._making = threading.Lock()
        """Held while memory is taken, which is slow; before `_lock`."""
        self._lock = threading.Lock()
        """Of the slots and of what is known of them, for moments only."""
        self._slots: list[OwnSlot] = []
        self._newest: OwnSlot | None = None
        self._sending: OwnSlot | None = None
        self._arrived: OwnSlot | None = None
        """The last of which the buddy has a copy."""
        self._retained: list[OwnSlot] = []
        """The last that was handed to the sender, and the last that had arrived then."""
        self._since_handed = 0
        self._num_made = 0
        self._key: Hashable = None
        self._shape: Shape | None = None
        self._restored: tuple[int, int] | None = None

    def prepare(self, state: Mapping[str, torch.Tensor], *, owns_replicated: bool) -> None:
        """Takes the memory and touches it, destroying nothing that is complete. SharedMemoryFull."""
        self._reserve(self._shape_of(state, owns_replicated, extra_bytes=0), _NUM_SLOTS)

    def write(
        self, state: Mapping[str, torch.Tensor], stamp: Stamp, extra: Mapping[str, Any], *, owns_replicated: bool
    ) -> None:
        """When it returns, `state` and `extra` may change.

        SharedMemoryFull; the earlier snapshots are unchanged then.
        """
        extra_json = json.dumps(extra, allow_nan=False).encode()
        shape = self._shape_of(state, owns_replicated, extra_bytes=len(extra_json))
        slot = self._take(shape, stamp.generation)
        file, regions = slot.file, shape.regions
        file.begin()
        _set_up(slot, shape)
        file.map[regions.extra_offset : regions.extra_offset + len(extra_json)] = extra_json
        _copy(slot, state, shape.plan)
        file.finish(regions, stamp, num_extra_bytes=len(extra_json))
        with self._lock:
            self._newest = slot
            self._since_handed += 1
            for misfit in [slot for slot in self._free(stamp.generation) if not _fits(slot, shape)]:
                self._remove(misfit)

    def keep_restored(self, generation: int, step: int) -> None:
        """The group was restored from this snapshot; it stays until the new generation has one of its own."""
        self._restored = generation, step

    def hand_over(self) -> tuple[OwnSlot, Callable[[], None]] | None:
        """The newest snapshot, which stays as it is until `sent`, and what the sender thread shall do first.

        None: there is no snapshot. Nothing is being sent: asserted.
        """
        with self._lock:
            assert self._sending is None
            slot, shape = self._newest, self._shape
            if slot is None or shape is None:
                return None
            self._sending = slot
            self._retained = [slot] if self._arrived is None else [self._arrived, slot]
            # Retained: two. Written: one. The newest is one of the retained if every snapshot is sent, else one more.
            num_slots = 3 if self._arrived is None or self._since_handed <= 1 else 4
            self._since_handed = 0

        def reserve() -> None:
            try:
                self._reserve(shape, num_slots)
            except SharedMemoryFull as error:
                _log.warning("memory.no_spare_slot", extra={"error": str(error)})

        return slot, reserve

    def sent(self, slot: OwnSlot, has_arrived: bool) -> None:
        """By the sender thread."""
        with self._lock:
            self._sending = None
            if has_arrived:
                self._arrived = slot
            else:
                self._retained = [other for other in self._retained if other is not slot]

    def forget_older(self, generation: int) -> None:
        """Nothing of before is retained any more; its slots are written over by and by."""
        with self._lock:
            self._retained = [slot for slot in self._retained if oldest_first(slot.file.header)[0] >= generation]
            if self._arrived not in self._retained:
                self._arrived = None

    def close(self) -> None:
        """The sender has ended."""
        with self._lock:
            for slot in tuple(self._slots):
                self._remove(slot)

    def _shape_of(self, state: Mapping[str, torch.Tensor], owns_replicated: bool, *, extra_bytes: int) -> Shape:
        key = plan_key(state, owns_replicated=owns_replicated)
        shape = self._shape
        if shape is None or key != self._key:
            shape = Shape.of(plan_save(state, owns_replicated=owns_replicated), extra_bytes=extra_bytes)
        elif extra_bytes > shape.regions.extra_room:
            shape = shape.with_room(extra_bytes)
        self._key, self._shape = key, shape
        return shape

    def _take(self, shape: Shape, generation: int) -> OwnSlot:
        """A slot that fits and may be written over; the sender's spare one is waited for if it is being made."""
        slot = self._choose(shape, generation)
        if slot is not None:
            return slot
        with self._making:
            slot = self._choose(shape, generation)
            if slot is not None:
                return slot
            with self._lock:
                for misfit in self._free(generation):
                    self._remove(misfit)
            try:
                return self._make(shape)
            except SharedMemoryFull:
                with self._lock:
                    last = self._sending, self._kept(generation)
                    given_up = [slot for slot in self._retained if slot not in last and _fits(slot, shape)]
                    if not given_up:
                        raise
                    self._retained.remove(given_up[0])
                    return given_up[0]

    def _choose(self, shape: Shape, generation: int) -> OwnSlot | None:
        with self._lock:
            return next((slot for slot in self._free(generation) if _fits(slot, shape)), None)

    def _free(self, generation: int) -> list[OwnSlot]:
        """What may be written over, oldest first."""
        held = (self._sending, self._kept(generation), *self._retained)
        return sorted(
            (slot for slot in self._slots if slot not in held), key=lambda slot: oldest_first(slot.file.header)
        )

    def _kept(self, generation: int) -> OwnSlot | None:
        headers = [slot.file.header for slot in self._slots]
        header = kept(headers, generation=generation, restored=self._restored)
        return None if header is None else self._slots[headers.index(header)]

    def _reserve(self, shape: Shape, num_slots: int) -> None:
        with self._making:
            while sum(_fits(slot, shape) for slot in tuple(self._slots)) < num_slots:
                try:
                    slot = self._make(shape)
                except SharedMemoryFull:
                    if len(self._slots) < _NUM_SLOTS:
                        raise
                    return  # slots of another layout will make room, once they may go
                _set_up(slot, shape)

    def _make(self, shape: Shape) -> OwnSlot:
        self._num_made += 1
        slot = OwnSlot(SlotFile(self._directory / f"own-{self._num_made}", shape.regions.file_bytes))
        with self._lock:
            self._slots.append(slot)
        return slot

    def _remove(self, slot: OwnSlot) -> None:
        self._slots.remove(slot)
        if slot is self._arrived:
            self._arrived = None
        slot.views, slot.addresses, slot.shape = [], [], None
        slot.file.remove()


def _fits(slot: OwnSlot, shape: Shape) -> bool:
    return slot.file.fits(shape.regions.file_bytes)


def _set_up(slot: OwnSlot, shape: Shape) -> None:
    """Lays the slot out; costs nothing when it is laid out so already. Nothing is complete in it."""
    if slot.shape is shape:
        return
    payload = shape.lay_out(slot.file)
    slot.views = [view_of(payload, item) for item in shape.plan.items]
    slot.addresses = [view.data_ptr() for view in slot.views]
    slot.shape = shape


def _copy(slot: OwnSlot, state: Mapping[str, torch.Tensor], plan: SavePlan) -> None:
    """By memmove where it can be: torch's own loop writes through the cache, which takes longer."""
    views, others = [], []
    for item, view, address in zip(plan.items, slot.views, slot.addresses, strict=True):
        tensor = state[item.fqn]
        source = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if source.is_cpu and source.is_contiguous() and source.nbytes == item.nbytes:
            ctypes.memmove(address, source.data_ptr(), item.nbytes)
        else:
            views.append(view)
            others.append(source.detach())
    if others:
        with torch.no_grad():
            torch._foreach_copy_(views, others, non_blocking=True)
    for device in {source.device for source in others if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
