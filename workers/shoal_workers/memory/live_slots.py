"""Shared memory in which a run's tensors live while it trains: a snapshot after every step that copies nothing.

    | complete: step s | begin | the optimizer writes step s + 1 | finish | complete: step s + 1 | begin ...

A process that is killed outside of its update leaves a complete part of the step that it had reached. One that is
killed within leaves none; then the group goes back to the last snapshot of which every rank has a copy (own_slots.py).

    live    the tensors of the current model
            and those of the generation that the group was restored from, until it has a whole snapshot of its own

Training thread only.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shoal_workers.checkpoint.save_plan import SavePlan
from shoal_workers.memory.shape import Shape, view_of
from shoal_workers.memory.slot import SlotFile, Stamp


class LiveSlot:
    """One model's and optimizer's. Whoever lets tensors live in it brackets every change of them."""

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
        self._current: SlotFile | None = None
        self._num_made = 0
        self._restored: tuple[int, int] | None = None

    def make(self, plan: SavePlan, *, extra_bytes: int) -> LiveSlot:
        """For a model that was just made; nothing lives in those of earlier models any more. MemoryFull."""
        shape = Shape.of(plan, extra_bytes=extra_bytes)
        self._current = None
        free = [file for file in self._files if not self._is_source(file)]
        fitting = next((file for file in free if file.fits(shape.regions.file_bytes)), None)
        for file in free:
            if file is not fitting:
                self._remove(file)
        if fitting is None:
            self._num_made += 1
            fitting = SlotFile(self._directory / f"own-live-{self._num_made}", shape.regions.file_bytes)
            self._files.append(fitting)
        fitting.begin()
        self._current = fitting
        return LiveSlot(fitting, shape)

    def keep_restored(self, generation: int, step: int) -> None:
        """The group was restored from this snapshot; it stays until it is forgotten."""
        self._restored = generation, step

    def forget_older(self, generation: int) -> None:
        """Frees what lived in generations before."""
        for file in tuple(self._files):
            if file is not self._current and (file.header is None or file.header.generation < generation):
                self._remove(file)

    def close(self) -> None:
        for file in tuple(self._files):
            self._remove(file)

    def _is_source(self, file: SlotFile) -> bool:
        return file.header is not None and (file.header.generation, file.header.step) == self._restored

    def _remove(self, file: SlotFile) -> None:
        self._files.remove(file)
        file.remove()
