"""Shared memory in which a run's tensors live while it trains: a snapshot after every step that copies nothing.

    slot 0   complete: step 4 | begin | the optimizer writes step 6 | finish | complete: step 6 ...
    slot 1   complete: step 5 .............................................. | begin | step 7 ...

All ranks vote before each update, so when a rank begins to write step 6 everybody's step 5 is complete: whoever is
killed when, one step is whole, and it is at most one behind.

Kept besides the two of the current model: what the group was restored from, until it has a whole snapshot of its own.
Training thread only.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shoal_workers.checkpoint.save_plan import SavePlan
from shoal_workers.snapshot_store.errors import SharedMemoryFull
from shoal_workers.snapshot_store.slot import SlotFile, Stamp
from shoal_workers.snapshot_store.slot_shape import Shape, view_of

_NUM_SLOTS = 2


class LiveSlot:
    """One of two. Whoever lets tensors live in it brackets every change of them."""

    def __init__(self, file: SlotFile, shape: Shape) -> None:
        self._file = file
        self._shape = shape
        self._payload = shape.lay_out(file)
        self._offsets = {item.fqn: item for item in shape.plan.items}

    @property
    def plan(self) -> SavePlan:
        return self._shape.plan

    def view(self, fqn: str) -> torch.Tensor:
        """Of the item's dtype and sizes."""
        return view_of(self._payload, self._offsets[fqn])

    def room(self, fqn: str, num_bytes: int) -> torch.Tensor:
        """The item's bytes and, if it was asked for, what follows them; uint8."""
        start = self._offsets[fqn].file_offset
        return self._payload[start : start + num_bytes]

    def is_of(self, generation: int, step: int) -> bool:
        """It holds that state, complete."""
        header = self._file.header
        return header is not None and (header.generation, header.step) == (generation, step)

    def begin(self) -> None:
        """From here until `finish` nobody takes it for a part."""
        self._file.begin()

    def finish(self, stamp: Stamp, extra_json: bytes) -> bool:
        """It holds the state that the stamp says. False: there is no room for so much, and it stays incomplete."""
        file, regions = self._file, self._shape.regions
        if len(extra_json) > regions.extra_room:
            return False
        file.begin()
        file.map[regions.extra_offset : regions.extra_offset + len(extra_json)] = extra_json
        file.finish(regions, stamp, num_extra_bytes=len(extra_json))
        return True


class LiveSlots:
    """A process's, over its generations."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[SlotFile] = []
        self._current: list[SlotFile] = []
        self._num_made = 0
        self._restored: tuple[int, int] | None = None

    def make(self, plan: SavePlan, *, extra_bytes: int) -> tuple[LiveSlot, ...]:
        """Two, for a model that was just made; nothing lives in those of earlier models any more. SharedMemoryFull."""
        shape = Shape.of(plan, extra_bytes=extra_bytes)
        free = [file for file in self._files if not self._is_source(file)]
        self._current = [file for file in free if file.fits(shape.regions.file_bytes)][:_NUM_SLOTS]
        for file in free:
            if file not in self._current:
                self._remove(file)
        try:
            while len(self._current) < _NUM_SLOTS:
                self._current.append(self._made(shape))
        except SharedMemoryFull:
            for file in self._current:
                self._remove(file)
            self._current = []
            raise
        for file in self._current:
            file.begin()
        return tuple(LiveSlot(file, shape) for file in self._current)

    def keep_restored(self, generation: int, step: int) -> None:
        """The group was restored from this snapshot; it stays until it is forgotten."""
        self._restored = generation, step

    def forget_older(self, generation: int) -> None:
        """Frees what lived in generations before."""
        for file in tuple(self._files):
            if file not in self._current and (file.header is None or file.header.generation < generation):
                self._remove(file)

    def close(self) -> None:
        for file in tuple(self._files):
            self._remove(file)

    def _made(self, shape: Shape) -> SlotFile:
        self._num_made += 1
        file = SlotFile(self._directory / f"own-live-{self._num_made}", shape.regions.file_bytes)
        self._files.append(file)
        return file

    def _is_source(self, file: SlotFile) -> bool:
        return file.header is not None and (file.header.generation, file.header.step) == self._restored

    def _remove(self, file: SlotFile) -> None:
        self._files.remove(file)
        file.remove()
