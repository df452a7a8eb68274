"""Keeps a run's state in shared memory that outlives the worker, so that a worker's death costs no completed step.

    first step of a job       the tensors are copied once, and everything that refers to them is pointed to the copy
    restore                   everything is pointed to a buffer first, and the values are read straight into it
    every update              reads one of two buffers and writes the other, which is then marked with its step:
                              one buffer is complete at every moment, whenever a worker is killed
    re-forming                other ranks read from the buffer what they need; if the layout stays, nothing is read

      buffer 0   | step 4 ........................... | writes step 6 | step 6 ...
      buffer 1   | step 3 | writes step 5 | step 5 .......................... | writes step 7
                          vote 5                      vote 6: step 5 is complete on every rank

Works on the CPU, with the default optimizer, which writes its results to the other buffer, and with an elementwise one
of the task: then the state is copied to the other buffer first, and updated there. Of other optimizers it is not known
what else refers to their tensors. Tensors that cannot be moved (buffers, counters) are copied at each `finish`. If they
are more than a small part of the state, nothing is moved, and snapshots are copies, as on a GPU. Uses private
attributes of torch.distributed.fsdp; tests/dist/state/test_double_buffered_state.py fails if a torch version changes
them. Called by the trainer and by `Snapshots`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal_workers.checkpoint.save_plan import local_tensor, plan_save
from shoal_workers.contract.snapshots import SnapshotSource
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.state.state_view import StateView
from shoal_workers.engine.step.double_buffered_adamw import ParameterBuffers
from shoal_workers.engine.step.update import Update
from shoal_workers.snapshot_store.log.rules import keep_tensors
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
        self._can_move = update.is_elementwise
        self.why_copies = "" if update.is_elementwise else update.not_logged
        """Why snapshots are copies of the state, once it was to be moved; empty: it is in shared memory."""
        self.keeps_restored = True
        """What the group was restored from may still be needed after the first update; set before it."""
        self._store: SnapshotStore | None = None
        self._slots: list[LiveSlot] = []
        """None, or one until the first update, or two."""
        self._is_filled_anew = False
        """The current buffer was read from other memory in this generation's restore."""
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

    def move_to_shared_memory(
        self,
        store: SnapshotStore,
        *,
        owns_replicated: bool,
        extra_bytes: int,
        restoring: SnapshotSource | None = None,
        with_values: bool = True,
    ) -> bool:
        """Called once the optimizer's state exists, between two steps or before a restore. False: it cannot be moved.

        Args:
            restoring: what the group is about to be restored from.
            with_values: keep the values. Otherwise they are arbitrary afterwards.

        Raises:
            SharedMemoryFull: nothing was moved, and later calls return False.
        """
        assert not self._slots
        if not self._can_move:
            return False
        self._can_move = False  # a failed attempt is not repeated
        self.why_copies = "shared memory cannot hold the state twice"
        plan = plan_save(self.view.tensors(), owns_replicated=owns_replicated, every_replica=True)
        movable = list(self._movable({item.fqn for item in plan.items}))
        moved_names = frozenset(name for parameter in movable for name in parameter.names)
        copied = [item for item in plan.items if item.fqn not in moved_names]
        if (num_bytes := sum(item.nbytes for item in copied)) > _MAX_COPIED_SHARE * plan.total_bytes:
            share = num_bytes / plan.total_bytes
            self.why_copies = f"{share:.0%} of the state are buffers and other tensors that cannot be moved"
            return False
        rooms = {parameter.names[0]: parameter.sharded._sharded_param_data.nbytes for parameter in movable}
        slot = store.live_slot(with_rooms(plan, rooms), extra_bytes=extra_bytes, restoring=restoring)
        self._store = store
        self._moved, self._moved_names = movable, moved_names
        self._copied_names = tuple(item.fqn for item in copied)
        self._add(slot)
        if with_values:
            with torch.no_grad():
                for parameter, buffers in zip(movable, self._buffers[0], strict=True):
                    parameter.copy_to(buffers)
        self.view.forget()
        self._point_to(0)
        self.why_copies = ""
        return True

    def _add(self, slot: LiveSlot) -> None:
        buffers = [parameter.buffers_in(slot) for parameter in self._moved]
        with torch.no_grad():
            for parameter, one in zip(self._moved, buffers, strict=True):
                one.flat[parameter.local.numel() :].zero_()  # FSDP's padding
        self._slots.append(slot)
        self._buffers.append(buffers)
        if self.update.double_buffered is not None:
            self._targets.append(
                {parameter.local_parameter: one.as_adamw() for parameter, one in zip(self._moved, buffers, strict=True)}
            )

    def step(self, lr_factor: float) -> None:
        """One update. The state before it stays complete until the next update."""
        optimizer = self.update.double_buffered
        if not self._slots:
            self.update.step(lr_factor)
            return
        if len(self._slots) == 1:
            assert self._store is not None
            self._add(self._store.second_live_slot(keep_restored=self.keeps_restored))
        other = 1 - self._current
        self._slots[other].begin()
        if optimizer is not None:
            optimizer.targets = self._targets[other]
            self.update.step(lr_factor)
            self._point_to(other)
        else:
            self._copy_to(other)
            self._point_to(other)
            self.update.step(lr_factor)
            for parameter in self._moved:
                keep_tensors(self.update.optimizer.state[parameter.local_parameter], parameter.state)

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

    def finish_restored(self, stamp: Stamp, extra_json: bytes) -> bool:
        """After a restore: mark the buffer into which the state was read as complete.

        False: it was not read into another buffer. A buffer that holds the step already keeps its mark, because the
        others may hold no other snapshot than that one."""
        return self._is_filled_anew and self.finish(stamp, extra_json)

    def tensors_to_restore(self, source: SnapshotSource | None) -> dict[str, Tensor]:
        """Before a restore: the tensors that must be overwritten.

        If one of the buffers holds the step to restore, it becomes the current one, and only what was not moved is
        returned. Otherwise all of the state is returned, and the current buffer is marked as incomplete, so that no
        other rank reads from it."""
        self._is_filled_anew = False
        for index, slot in enumerate(self._slots):
            if source is not None and slot.is_of(source.generation, source.step):
                self._point_to(index)
                return {name: tensor for name, tensor in self.view.tensors().items() if name not in self._moved_names}
        if self._slots:
            self._slots[self._current].begin()
            self._is_filled_anew = True
        return self.view.tensors()

    def _copy_to(self, index: int) -> None:
        old, new = self._buffers[self._current], self._buffers[index]
        with torch.no_grad():
            torch._foreach_copy_(
                [tensor for buffers in new for tensor in buffers.tensors],
                [tensor for buffers in old for tensor in buffers.tensors],
            )

    def _point_to(self, index: int) -> None:
        """Point everything that refers to the state to the slot of this index."""
        self._current = index
        for parameter, buffers in zip(self._moved, self._buffers[index], strict=True):
            parameter.point_to(buffers)
        self.view.turn_to(index)

    def _movable(self, planned: Collection[str]) -> Iterator[_MovedParameter]:
        """Parameters of which this rank has a part, with their optimizer state."""
        optimizer = self.update.optimizer
        is_stateless = _is_stateless(optimizer)
        sharded = {id(p.sharded_param): p for group in self._assembly.param_groups() for p in group.fsdp_params}
        for name, parameter in self._assembly.named_parameters():
            local_parameter = self.update.local_parameter(parameter)
            state = optimizer.state.get(local_parameter) if local_parameter is not None else None
            if (
                local_parameter is None
                or not (state or is_stateless)
                or id(parameter) not in sharded
                or not isinstance(parameter, DTensor)
            ):
                continue
            own_state = {
                key: value
                for key, value in (state or {}).items()
                if isinstance(value, Tensor) and value.shape == local_parameter.shape
            }
            moved = _MovedParameter(
                names=(f"model.{name}", *(f"optim.{name}.{key}" for key in own_state)),
                sharded=sharded[id(parameter)],
                local=parameter._local_tensor,
                local_parameter=local_parameter,
                state=own_state,
            )
            if moved.has_expected_layout and all(one in planned for one in moved.names):
                yield moved


@dataclass(frozen=True, slots=True)
class _SlotBuffers:
    """The memory of one parameter in one of the slots."""

    flat: Tensor
    """FSDP's flat, padded shard; `parameter` is its beginning."""
    parameter: Tensor
    state: dict[str, Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.parameter, *self.state.values())

    def as_adamw(self) -> ParameterBuffers:
        return ParameterBuffers(self.parameter, self.state["exp_avg"], self.state["exp_avg_sq"])


@dataclass(frozen=True, slots=True)
class _MovedParameter:
    """One parameter, and everything that refers to its memory and to that of its optimizer state."""

    names: tuple[str, ...]
    """Of the parameter and of its state."""
    sharded: Any
    """FSDP's record of the parameter."""
    local: Tensor
    """Local tensor of the model's DTensor."""
    local_parameter: nn.Parameter
    """The optimizer's parameter."""
    state: dict[str, Tensor]
    """Those of the parameter's shape."""

    @property
    def has_expected_layout(self) -> bool:
        """All of its tensors are laid out as this module assumes."""
        flat, tensors = (
            self.sharded._sharded_param_data,
            (self.local, self.local_parameter, *self.state.values()),
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
        state = {key: slot.view(name) for key, name in zip(self.state, self.names[1:], strict=True)}
        return _SlotBuffers(flat, shard, state)

    def copy_to(self, target: _SlotBuffers) -> None:
        target.parameter.copy_(self.local)
        for key, tensor in self.state.items():
            target.state[key].copy_(tensor)

    def point_to(self, target: _SlotBuffers) -> None:
        self.sharded._sharded_param_data = target.flat
        self.local.data = self.local_parameter.data = target.parameter
        for key, tensor in self.state.items():
            tensor.data = target.state[key]


def _is_stateless(optimizer: Optimizer) -> bool:
    return not any(optimizer.state.values())
