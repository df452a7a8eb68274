"""Keeps a run's state in shared memory that outlives the worker, so that a worker's death costs no completed step.

    first step of a model     the tensors are copied once, and everything that refers to them is pointed to the copy
    every update              reads one of two buffers and writes the other, which is then marked with its step:
                              one buffer is complete at every moment, whenever a worker is killed
    re-forming                other ranks read from the buffer what they need; if the layout stays, nothing is read

      buffer 0   | step 4 ........................... | writes step 6 | step 6 ...
      buffer 1   | step 3 | writes step 5 | step 5 .......................... | writes step 7
                          vote 5                      vote 6: step 5 is complete on every rank

Works on the CPU with the default optimizer only, because only then is it known what else refers to the optimizer's
tensors. Tensors that cannot be moved (buffers, counters) are copied at each `finish`. If they are more than a small
part of the state, nothing is moved, and snapshots are copies, as on a GPU. Uses private attributes of
torch.distributed.fsdp; tests/dist/state/test_double_buffered_state.py fails if a torch version changes them. Called by
the trainer and by `Snapshots`.
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
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.state.state_view import StateView
from shoal_workers.engine.step.double_buffered_adamw import ParameterBuffers
from shoal_workers.engine.step.update import Update
from shoal_workers.snapshot_store.slots.live_slots import LiveSlot
from shoal_workers.snapshot_store.slots.shape import with_rooms
from shoal_workers.snapshot_store.slots.slot import Stamp
from shoal_workers.snapshot_store.store import SnapshotStore

_MAX_COPIED_SHARE = 0.02
"""Largest share of the state's bytes that is copied at each step."""


class DoubleBufferedState:
    """The state of one model and its optimizer; in private memory at first. Training thread only."""

    def __init__(self, assembly: Assembly, update: Update) -> None:
        self.view = StateView(assembly, update)
        self.update = update
        self._assembly = assembly
        self._can_move = update.double_buffered is not None
        self._slots: tuple[LiveSlot, ...] = ()
        self._current = 0
        """Index of the slot that holds the state."""
        self._moved: list[_MovedParameter] = []
        self._buffers: list[list[_SlotBuffers]] = []
        """By slot, by moved parameter."""
        self._targets: list[dict[nn.Parameter, ParameterBuffers]] = []
        """By slot."""
        self._moved_names: frozenset[str] = frozenset()
        self._copied_names: tuple[str, ...] = ()

    @property
    def is_in_shared_memory(self) -> bool:
        return bool(self._slots)

    def move_to_shared_memory(self, store: SnapshotStore, *, owns_replicated: bool, extra_bytes: int) -> bool:
        """Called once the optimizer's state exists, between two steps. False: this state cannot be moved.

        Raises:
            SharedMemoryFull: nothing was moved, and later calls return False.
        """
        assert not self._slots
        if not self._can_move:
            return False
        self._can_move = False  # a failed attempt is not repeated
        plan = plan_save(self.view.tensors(), owns_replicated=owns_replicated, every_replica=True)
        movable = list(self._movable({item.fqn for item in plan.items}))
        moved_names = frozenset(name for parameter in movable for name in parameter.names)
        copied = [item for item in plan.items if item.fqn not in moved_names]
        if sum(item.nbytes for item in copied) > _MAX_COPIED_SHARE * plan.total_bytes:
            return False
        rooms = {parameter.names[0]: parameter.sharded._sharded_param_data.nbytes for parameter in movable}
        self._slots = store.live_slots(with_rooms(plan, rooms), extra_bytes=extra_bytes)
        self._moved, self._moved_names = movable, moved_names
        self._copied_names = tuple(item.fqn for item in copied)
        self._buffers = [[parameter.buffers_in(slot) for parameter in movable] for slot in self._slots]
        self._targets = [
            {parameter.local_parameter: one.buffers for parameter, one in zip(movable, in_slot, strict=True)}
            for in_slot in self._buffers
        ]
        with torch.no_grad():
            for parameter, *in_slots in zip(movable, *self._buffers, strict=True):
                parameter.copy_to(in_slots[0])
                for one in in_slots:
                    one.flat[parameter.local.numel() :].zero_()  # FSDP's padding
        self.view.forget()
        self._point_to(0)
        return True

    def step(self, lr_factor: float) -> None:
        """One update. The state before it stays complete until the next update."""
        optimizer = self.update.double_buffered
        if not self._slots or optimizer is None:
            self.update.step(lr_factor)
            return
        other = 1 - self._current
        self._slots[other].begin()
        optimizer.targets = self._targets[other]
        self.update.step(lr_factor)
        self._point_to(other)

    def finish(self, stamp: Stamp, extra_json: bytes) -> bool:
        """Mark the current buffer as complete. It stays so until the update after the next.

        False: the state is not in shared memory, or its slot was taken away."""
        if not self._slots:
            return False
        slot = self._slots[self._current]
        slot.begin()
        if self._copied_names:
            state = self.view.tensors()
            with torch.no_grad():
                torch._foreach_copy_(
                    [slot.view(name) for name in self._copied_names],
                    [local_tensor(state[name]) for name in self._copied_names],
                )
        return slot.finish(stamp, extra_json)

    def tensors_to_restore(self, source: SnapshotSource | None) -> dict[str, Tensor]:
        """Before a restore: the tensors that must be overwritten.

        If one of the buffers holds the step to restore, it becomes the current one, and only what was not moved is
        returned. Otherwise all of the state is returned, and the current buffer is marked as incomplete, so that no
        other rank reads from it."""
        for index, slot in enumerate(self._slots):
            if source is not None and slot.is_of(source.generation, source.step):
                self._point_to(index)
                return {name: tensor for name, tensor in self.view.tensors().items() if name not in self._moved_names}
        if self._slots:
            self._slots[self._current].begin()
        return self.view.tensors()

    def _point_to(self, index: int) -> None:
        """Point everything that refers to the state to the slot of this index."""
        self._current = index
        for parameter, buffers in zip(self._moved, self._buffers[index], strict=True):
            parameter.point_to(buffers)
        self.view.turn_to(index)

    def _movable(self, planned: Collection[str]) -> Iterator[_MovedParameter]:
        """Parameters of which this rank has a part, with their optimizer state."""
        optimizer = self.update.double_buffered
        assert optimizer is not None
        sharded = {id(p.sharded_param): p for group in self._assembly.param_groups() for p in group.fsdp_params}
        for name, parameter in self._assembly.named_parameters():
            local_parameter = self.update.local_parameter(parameter)
            state = optimizer.state.get(local_parameter) if local_parameter is not None else None
            if (
                local_parameter is None
                or not state
                or id(parameter) not in sharded
                or not isinstance(parameter, DTensor)
            ):
                continue
            moved = _MovedParameter(
                names=(f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"),
                sharded=sharded[id(parameter)],
                local=parameter._local_tensor,
                local_parameter=local_parameter,
                exp_avg=state["exp_avg"],
                exp_avg_sq=state["exp_avg_sq"],
            )
            if moved.has_expected_layout and all(one in planned for one in moved.names):
                yield moved


@dataclass(frozen=True, slots=True)
class _SlotBuffers:
    """The memory of one parameter in one of the slots."""

    flat: Tensor
    """FSDP's flat, padded shard; `buffers.parameter` is its beginning."""
    buffers: ParameterBuffers


@dataclass(frozen=True, slots=True)
class _MovedParameter:
    """One parameter, and everything that refers to its memory and to that of its moments."""

    names: tuple[str, str, str]
    sharded: Any
    """FSDP's record of the parameter."""
    local: Tensor
    """Local tensor of the model's DTensor."""
    local_parameter: nn.Parameter
    """The optimizer's parameter."""
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def has_expected_layout(self) -> bool:
        """All of its tensors are laid out as this module assumes."""
        flat, tensors = (
            self.sharded._sharded_param_data,
            (self.local, self.local_parameter, self.exp_avg, self.exp_avg_sq),
        )
        return (
            all(tensor.is_cpu and tensor.is_contiguous() and tensor.shape == self.local.shape for tensor in tensors)
            and self.local.data_ptr() == self.local_parameter.data_ptr() == flat.data_ptr()
            and flat.dtype == self.local.dtype
        )

    def buffers_in(self, slot: LiveSlot) -> _SlotBuffers:
        source = self.sharded._sharded_param_data
        flat = slot.room(self.names[0], source.nbytes).view(source.dtype)
        shard = flat[: self.local.numel()].view(self.local.shape)
        return _SlotBuffers(flat, ParameterBuffers(shard, slot.view(self.names[1]), slot.view(self.names[2])))

    def copy_to(self, target: _SlotBuffers) -> None:
        target.buffers.parameter.copy_(self.local)
        target.buffers.exp_avg.copy_(self.exp_avg)
        target.buffers.exp_avg_sq.copy_(self.exp_avg_sq)

    def point_to(self, target: _SlotBuffers) -> None:
        self.sharded._sharded_param_data = target.flat
        self.local.data = self.local_parameter.data = target.buffers.parameter
        self.exp_avg.data = target.buffers.exp_avg
        self.exp_avg_sq.data = target.buffers.exp_avg_sq
