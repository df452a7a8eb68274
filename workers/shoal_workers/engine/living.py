"""Lets a run's state live in shared memory that outlives the process, so that a death costs no step that was complete.

    first step of a model     the tensors are copied once, and everything that refers to them is told
    every update              begin | optimizer | finish: the memory says of itself which step it holds
    re-forming                others read from it what they need; where the layout stays, nobody reads anything

On CPU only, and only with the default optimizer: of that one it is known who else refers to its tensors. What cannot be
moved (buffers) is copied at each `finish`; where that is much, nothing is moved, and snapshots are copies as on a GPU.
Uses private attributes of torch.distributed.fsdp; tests/dist/test_living.py fails if a torch version changes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.save_plan import local_tensor, plan_save
from shoal_workers.contract.memory import MemorySource
from shoal_workers.engine.assembly import Assembly
from shoal_workers.engine.state_view import StateView
from shoal_workers.engine.update import Update
from shoal_workers.memory.live_slots import LiveSlot
from shoal_workers.memory.shape import with_rooms
from shoal_workers.memory.slot import Stamp
from shoal_workers.memory.tier import RamTier

_MOST_COPIED = 0.02
"""Of the state's bytes, at each step."""


@dataclass(frozen=True, slots=True)
class _Home:
    """Where one named tensor is, and how everything that refers to it is moved elsewhere."""

    num_bytes: int
    """With padding."""
    move: Callable[[Tensor], None]
    """To memory of that many bytes; takes the values along."""


class Living:
    """Of one model and its optimizer. Training thread only."""

    def __init__(self, assembly: Assembly, update: Update, view: StateView) -> None:
        self._assembly = assembly
        self._update = update
        self._view = view
        self._slot: LiveSlot | None = None
        self._stays = not update.is_default
        """Where it is, for good."""
        self._moved: frozenset[str] = frozenset()
        self._copied: tuple[str, ...] = ()

    @property
    def has_moved(self) -> bool:
        return self._slot is not None

    def move_in(self, ram: RamTier, *, owns_replicated: bool, extra: dict[str, Any]) -> bool:
        """The optimizer's state exists, and no step is under way. False: this state cannot be moved. MemoryFull."""
        assert self._slot is None
        if self._stays:
            return False
        self._stays = True  # unless all of the following succeeds
        state = self._view.tensors()
        plan = plan_save(state, owns_replicated=owns_replicated)
        homes = {name: home for name, home in self._homes() if local_tensor(state[name]).is_cpu}
        copied = [item for item in plan.items if item.fqn not in homes]
        if sum(item.nbytes for item in copied) > _MOST_COPIED * plan.total_bytes:
            return False
        rooms = {name: home.num_bytes for name, home in homes.items()}
        slot = ram.live_slot(with_rooms(plan, rooms), extra_bytes=len(_encoded(extra)))
        moved = [item.fqn for item in plan.items if item.fqn in homes]
        with torch.no_grad():
            for name in moved:
                homes[name].move(slot.room(name, homes[name].num_bytes))
        self._view.forget()
        self._slot, self._moved, self._copied = slot, frozenset(moved), tuple(item.fqn for item in copied)
        return True

    def begin(self) -> None:
        """The state is about to change."""
        if self._slot is not None:
            self._slot.begin()

    def finish(self, stamp: Stamp, extra: dict[str, Any]) -> bool:
        """The state is that of the stamp, and stays so until `begin`. False: nobody will find it."""
        slot = self._slot
        if slot is None:
            return False
        slot.begin()
        state = self._view.tensors()
        for name in self._copied:
            slot.view(name).copy_(local_tensor(state[name]))
        return slot.finish(stamp, _encoded(extra))

    def to_read(self, source: MemorySource | None) -> dict[str, Tensor]:
        """Before a restore: the part of the state that is not there already. The rest must be overwritten: nobody takes
        what lives here for a part any more."""
        state = self._view.tensors()
        if self._slot is None:
            return state
        if source is not None and self._slot.is_of(source.generation, source.step):
            return {name: tensor for name, tensor in state.items() if name not in self._moved}
        self._slot.begin()
        return state

    def _homes(self) -> Iterator[tuple[str, _Home]]:
        sharded = {id(p.sharded_param): p for group in self._assembly.param_groups() for p in group.fsdp_params}
        for name, parameter in self._assembly.named_parameters():
            if id(parameter) in sharded:
                home = _home_of(sharded[id(parameter)], self._update.stand_in(parameter))
                if home is not None:
                    yield f"model.{name}", home
        for name, key, tensor in self._update.tensors():
            if tensor.is_contiguous():
                yield f"optim.{name}.{key}", _Home(tensor.nbytes, partial(_move, tensor))


def _home_of(sharded: Any, stand_in: nn.Parameter | None) -> _Home | None:
    """Of one of FSDP's parameters; its shard is the beginning of the padded flat one that is gathered."""
    parameter, flat = sharded.sharded_param, sharded._sharded_param_data
    local = parameter._local_tensor if isinstance(parameter, DTensor) else None
    if local is None or not local.is_contiguous() or local.data_ptr() != flat.data_ptr():
        return None
    if parameter.requires_grad and (stand_in is None or stand_in.data_ptr() != flat.data_ptr()):
        return None

    def move(memory: Tensor) -> None:
        sharded._sharded_param_data = data = memory.view(flat.dtype)
        data.copy_(flat)
        shard = data[: local.numel()].view(local.shape)
        for own in (local, stand_in):
            if own is not None:
                own.data = shard

    return _Home(flat.nbytes, move)


def _move(tensor: Tensor, memory: Tensor) -> None:
    moved = memory.view(tensor.dtype).view(tensor.shape)
    moved.copy_(tensor)
    tensor.data = moved


def _encoded(extra: dict[str, Any]) -> bytes:
    return json.dumps(extra, allow_nan=False).encode()
