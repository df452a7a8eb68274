"""Lets a run's state live in shared memory that outlives the process, so that a death costs no step that was complete.

    first step of a model     the tensors are copied once, and everything that refers to them is told
    every update              reads one of two places and writes the other, which then says which step it holds:
                              one place is complete at every moment, whoever is killed when
    re-forming                others read from it what they need; where the layout stays, nobody reads anything

      place 0   | step 4 ........................... | writes step 6 | step 6 ...
      place 1   | step 3 | writes step 5 | step 5 .......................... | writes step 7
                         vote 5                      vote 6: everybody's step 5 is complete

On CPU only, and only with the default optimizer: of that one it is known who else refers to its tensors. What cannot be
moved (buffers, counters) is copied at each `finish`; where that is much, nothing is moved, and snapshots are copies as
on a GPU. Uses private attributes of torch.distributed.fsdp;
tests/dist/state/test_double_buffered_state.py fails if a torch version changes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.save_plan import local_tensor, plan_save
from shoal_workers.contract.snapshots import SnapshotSource
from shoal_workers.engine.model.assembly import Assembly
from shoal_workers.engine.state.double_buffered_adamw import Place
from shoal_workers.engine.state.state_view import StateView
from shoal_workers.engine.step.update import Update
from shoal_workers.snapshot_store.live_slots import LiveSlot
from shoal_workers.snapshot_store.slot import Stamp
from shoal_workers.snapshot_store.slot_shape import with_rooms
from shoal_workers.snapshot_store.store import SnapshotStore

_MOST_COPIED = 0.02
"""Of the state's bytes, at each step."""


class DoubleBufferedState:
    """Of one model and its optimizer. Training thread only."""

    def __init__(self, assembly: Assembly, update: Update, view: StateView) -> None:
        self._assembly = assembly
        self._update = update
        self._view = view
        self._stays = update.double_buffered is None
        """Where it is, for good."""
        self._slots: tuple[LiveSlot, ...] = ()
        self._at = 0
        """Which of them holds the state."""
        self._rows: list[_Row] = []
        self._spots: list[list[_Spot]] = []
        """By slot, by row."""
        self._places: list[dict[nn.Parameter, Place]] = []
        self._moved: frozenset[str] = frozenset()
        self._copied: tuple[str, ...] = ()

    @property
    def has_moved(self) -> bool:
        return bool(self._slots)

    def move_in(self, ram: SnapshotStore, *, owns_replicated: bool, extra_bytes: int) -> bool:
        """The optimizer's state exists, and no step is under way. False: this state cannot be moved.

        SharedMemoryFull.
        """
        assert not self._slots
        if self._stays:
            return False
        self._stays = True  # unless all of the following succeeds
        plan = plan_save(self._view.tensors(), owns_replicated=owns_replicated)
        rows = list(self._movable({item.fqn for item in plan.items}))
        moved = frozenset(name for row in rows for name in row.names)
        copied = [item for item in plan.items if item.fqn not in moved]
        if sum(item.nbytes for item in copied) > _MOST_COPIED * plan.total_bytes:
            return False
        rooms = {row.names[0]: row.sharded._sharded_param_data.nbytes for row in rows}
        self._slots = ram.live_slots(with_rooms(plan, rooms), extra_bytes=extra_bytes)
        self._rows, self._moved, self._copied = rows, moved, tuple(item.fqn for item in copied)
        self._spots = [[row.spot(slot) for row in rows] for slot in self._slots]
        self._places = [
            {row.local_parameter: spot.place for row, spot in zip(rows, spots, strict=True)} for spots in self._spots
        ]
        with torch.no_grad():
            for row, *spots in zip(rows, *self._spots, strict=True):
                row.fill(spots[0])
                for spot in spots:
                    spot.flat[row.local.numel() :].zero_()  # FSDP's padding
        self._view.forget()
        self._point(0)
        return True

    def step(self, lr_factor: float) -> None:
        """One update. The state before it stays whole until the next."""
        optimizer = self._update.double_buffered
        if not self._slots or optimizer is None:
            self._update.step(lr_factor)
            return
        other = 1 - self._at
        self._slots[other].begin()
        optimizer.places = self._places[other]
        self._update.step(lr_factor)
        self._point(other)

    def finish(self, stamp: Stamp, extra_json: bytes) -> bool:
        """The state is that of the stamp, and stays so until the update after the next. False: nobody will find it."""
        if not self._slots:
            return False
        slot = self._slots[self._at]
        slot.begin()
        if self._copied:
            state = self._view.tensors()
            with torch.no_grad():
                torch._foreach_copy_(
                    [slot.view(name) for name in self._copied], [local_tensor(state[name]) for name in self._copied]
                )
        return slot.finish(stamp, extra_json)

    def to_read(self, source: SnapshotSource | None) -> dict[str, Tensor]:
        """Before a restore: the part of the state that is not here already. The rest must be overwritten: nobody takes
        for a part what it lives in now."""
        for place, slot in enumerate(self._slots):
            if source is not None and slot.is_of(source.generation, source.step):
                self._point(place)
                return {name: tensor for name, tensor in self._view.tensors().items() if name not in self._moved}
        if self._slots:
            self._slots[self._at].begin()
        return self._view.tensors()

    def _point(self, place: int) -> None:
        """Let everything refer to this one of the slots."""
        self._at = place
        for row, spot in zip(self._rows, self._spots[place], strict=True):
            row.point(spot)
        self._view.turn_to(place)

    def _movable(self, planned: Collection[str]) -> Iterator[_Row]:
        """Parameters of which this rank has a part, with the optimizer's state of them."""
        optimizer = self._update.double_buffered
        assert optimizer is not None
        sharded = {id(p.sharded_param): p for group in self._assembly.param_groups() for p in group.fsdp_params}
        for name, parameter in self._assembly.named_parameters():
            local_parameter = self._update.local_parameter(parameter)
            state = optimizer.state.get(local_parameter) if local_parameter is not None else None
            if (
                local_parameter is None
                or not state
                or id(parameter) not in sharded
                or not isinstance(parameter, DTensor)
            ):
                continue
            row = _Row(
                names=(f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"),
                sharded=sharded[id(parameter)],
                local=parameter._local_tensor,
                local_parameter=local_parameter,
                exp_avg=state["exp_avg"],
                exp_avg_sq=state["exp_avg_sq"],
            )
            if row.is_plain and all(one in planned for one in row.names):
                yield row


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where one parameter's tensors are in one of the slots."""

    flat: Tensor
    """FSDP's flat, padded shard; `place.parameter` is its beginning."""
    place: Place


@dataclass(frozen=True, slots=True)
class _Row:
    """One parameter, and all that refers to the memory of it and of its moments."""

    names: tuple[str, str, str]
    sharded: Any
    """FSDP's record of it."""
    local: Tensor
    """Of the model's DTensor."""
    local_parameter: nn.Parameter
    """The optimizer's."""
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def is_plain(self) -> bool:
        """All of it is laid out as this module thinks it is."""
        flat, tensors = (
            self.sharded._sharded_param_data,
            (self.local, self.local_parameter, self.exp_avg, self.exp_avg_sq),
        )
        return (
            all(tensor.is_cpu and tensor.is_contiguous() and tensor.shape == self.local.shape for tensor in tensors)
            and self.local.data_ptr() == self.local_parameter.data_ptr() == flat.data_ptr()
            and flat.dtype == self.local.dtype
        )

    def spot(self, slot: LiveSlot) -> _Spot:
        source = self.sharded._sharded_param_data
        flat = slot.room(self.names[0], source.nbytes).view(source.dtype)
        shard = flat[: self.local.numel()].view(self.local.shape)
        return _Spot(flat, Place(shard, slot.view(self.names[1]), slot.view(self.names[2])))

    def fill(self, spot: _Spot) -> None:
        spot.place.parameter.copy_(self.local)
        spot.place.exp_avg.copy_(self.exp_avg)
        spot.place.exp_avg_sq.copy_(self.exp_avg_sq)

    def point(self, spot: _Spot) -> None:
        self.sharded._sharded_param_data = spot.flat
        self.local.data = self.local_parameter.data = spot.place.parameter
        self.exp_avg.data = spot.place.exp_avg
        self.exp_avg_sq.data = spot.place.exp_avg_sq
