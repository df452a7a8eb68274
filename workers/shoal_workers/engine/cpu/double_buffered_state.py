"""Keeps a run's state in shared memory that outlives the worker, so that a worker's death costs no completed step.

    first step of a job       the tensors are copied once, and everything that refers to them is pointed to the copy
    restore                   everything is pointed to a buffer first, and the values are read straight into it
    every update              is of a copy in the other one of two buffers, which is then marked with its step:
                              one buffer is complete at every moment, whenever a worker is killed
    re-forming                other ranks read from the buffer what they need; if the layout stays, nothing is read

      buffer 0   | step 4 ........................... | writes step 6 | step 6 ...
      buffer 1   | step 3 | writes step 5 | step 5 .......................... | writes step 7
                          vote 5                      vote 6: step 5 is complete on every rank

Works on the CPU. The state is copied to the other buffer and updated there: an AdamW that reads one buffer and writes
the other takes hardly less time. Of some optimizers it is not known what else refers to their tensors (`why_copies`).
Tensors that cannot be moved (buffers, counters) are copied at each `finish`. If they are more than a small part of the
state, nothing is moved, and snapshots are copies, as on a GPU.

A parameter that the optimizer does not have (a frozen one) is written to each buffer once, and costs a step nothing
more. A change in place between two steps is noticed by torch's count of changes, and the other buffer then gets the
values. A change within a pass would also change the snapshot of the step before, and is refused
(`parallel/written.py`).

A parameter has no optimizer state before its first gradient. The state that appears in an update has room in the
buffers if the restored one had room for it; otherwise the buffer that was just written gets a new layout before it is
marked, and the other one before it is written the next time, so that one buffer is complete all the time.

What it uses of FSDP2 is private; tests/dist/state/test_double_buffered_state.py fails if a torch version changes it.
Made by `build_runtime`, if the optimizer allows it (`state_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.save_plan import SavePlan, local_tensor, plan_save
from shoal_workers.contract.snapshots import SnapshotSource
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.process.warm_memory import return_freed_memory
from shoal_workers.engine.state.device_state import DeviceState
from shoal_workers.engine.step.update import Update
from shoal_workers.snapshot_store.slots.live_slots import LiveSlot
from shoal_workers.snapshot_store.slots.own_slots import with_rooms
from shoal_workers.snapshot_store.slots.slot_files import Stamp
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull
from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.torch_internals import local_of, set_shard_memory, shard_memory

_MAX_COPIED_SHARE = 0.02
"""Largest share of the state's bytes that is copied at each step."""


def state_of(assembly: Assembly, update: Update) -> DeviceState:
    """The state of a model on its device."""
    return DeviceState(assembly, update) if update.why_copies else DoubleBufferedState(assembly, update)


class DoubleBufferedState(DeviceState):
    """The state of one model and its optimizer; in private memory at first. Training thread only."""

    def __init__(self, assembly: Assembly, update: Update) -> None:
        super().__init__(assembly, update)
        self._assembly = assembly
        self._can_move = True
        self.why_copies = ""
        self._store: SnapshotStore | None = None
        self._slots: list[LiveSlot] = []
        """The buffers: none, one until the first update, or two."""
        self._is_filled_anew = False
        """The current buffer was read from other memory in this generation's restore."""
        self._current = 0
        """Index of the slot that holds the state."""
        self._moved: list[_MovedParameter] = []
        self._buffers: list[list[_SlotBuffers]] = []
        """The memory of each moved parameter, by slot and then by parameter."""
        self._moved_names: frozenset[str] = frozenset()
        self._copied_names: tuple[str, ...] = ()
        self._frozen_in: set[int] = set()
        """Indices of the slots that have the current values of the frozen parameters."""
        self._frozen_versions: tuple[int, ...] = ()
        self._kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        """Shape and type of all tensors of the state by name, when it was moved or settled."""
        self._owns_replicated = False
        self._extra_bytes = 0

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
        assert not self._slots
        if not self._can_move:
            return False
        self._can_move = False  # a failed attempt is not repeated
        self.why_copies = "shared memory cannot hold the state twice"
        self._store, self._owns_replicated, self._extra_bytes = store, owns_replicated, extra_bytes
        is_moved = self._lay_out(
            lambda plan: store.live_slot(plan, extra_bytes=extra_bytes, restoring=restoring), with_values=with_values
        )
        if is_moved and with_values:
            return_freed_memory()  # of the state: no later state of this worker is in private memory
        return is_moved

    def _lay_out(self, slot_for: Callable[[SavePlan], LiveSlot], *, with_values: bool) -> bool:
        """Move the state from private memory into the first slot. False: too much of it cannot be moved."""
        plan = self._plan()
        movable = list(self._movable({item.fqn for item in plan.items}))
        moved_names = frozenset(name for parameter in movable for name in parameter.names)
        copied = [item for item in plan.items if item.fqn not in moved_names]
        if (num_bytes := sum(item.nbytes for item in copied)) > _MAX_COPIED_SHARE * plan.total_bytes:
            share = num_bytes / plan.total_bytes
            self.why_copies = f"{share:.0%} of the state are buffers and other tensors that cannot be moved"
            return False
        rooms = {parameter.names[0]: parameter.memory.nbytes for parameter in movable}
        slot = slot_for(with_rooms(plan, rooms))
        self._hold([slot], movable, plan, with_values=with_values)
        self.why_copies = ""
        return True

    def _plan(self) -> SavePlan:
        return plan_save(self.view.tensors(), owns_replicated=self._owns_replicated, every_replica=True)

    def _hold(
        self, slots: list[LiveSlot], movable: list[_MovedParameter], plan: SavePlan, *, with_values: bool
    ) -> None:
        """Lay these slots out for the state, and point it to the current one. `with_values`: copy what is not there."""
        self._moved = movable
        self._moved_names = frozenset(name for parameter in movable for name in parameter.names)
        self._copied_names = tuple(item.fqn for item in plan.items if item.fqn not in self._moved_names)
        self._kinds = self._read_kinds()
        self._slots, self._buffers = [], []
        for slot in slots:
            self._add(slot)
        if with_values:
            with torch.no_grad():
                for parameter, buffers in zip(movable, self._buffers[self._current], strict=True):
                    parameter.copy_to(buffers)
        self._note_frozen(self._current)
        self.view.forget()
        self._point_to(self._current)

    def _add(self, slot: LiveSlot) -> None:
        buffers = [parameter.buffers_in(slot) for parameter in self._moved]
        with torch.no_grad():
            for parameter, buffer in zip(self._moved, buffers, strict=True):
                buffer.flat[parameter.local.numel() :].zero_()  # FSDP's padding
        slot.hold(self._moved_names | frozenset(self._copied_names))
        self._slots.append(slot)
        self._buffers.append(buffers)

    def settle(self) -> None:
        """Called after an update or a restore, before `finish`: finds the places of the optimizer's state that has
        appeared or has another shape, and leaves out of the next part what was dropped. If it has no room and there is
        no memory for any, the whole state is in private memory afterwards."""
        if not self._slots or self._read_kinds() == self._kinds:
            return
        if self._has_room():
            self._arrange()
            return
        for parameter, buffers in zip(self._moved, self._buffers[self._current], strict=True):
            # The values leave the slot before its file is laid out anew. The other slot stays complete meanwhile.
            parameter.point_to(buffers.in_private_memory())
        current, store, extra_bytes = self._slots[self._current], self._store, self._extra_bytes
        assert store is not None
        self._slots, self._buffers, self._current = [], [], 0
        self._moved_names, self._copied_names = frozenset(), ()
        self.view.turn_to(0)
        self.view.forget()
        self.why_copies = "shared memory cannot hold the state twice"
        try:
            if not self._lay_out(
                lambda plan: store.live.make_anew(current, plan, extra_bytes=extra_bytes), with_values=True
            ):
                self.why_left = "too much of the state that has appeared cannot be moved"
        except SharedMemoryFull as error:
            self.why_left = f"shared memory has no room for the optimizer's state that has appeared: {error}"

    def _read_kinds(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.view.tensors().items()}

    def _has_room(self) -> bool:
        items = {item.fqn: item for item in self._slots[0].plan.items}
        return all(
            (there := items.get(item.fqn)) is not None and replace(item, file_offset=there.file_offset) == there
            for item in self._plan().items
        )

    def _arrange(self, *, with_values: bool = True) -> None:
        """Lays the slots out for the state's tensors, which have changed and all have room there."""
        plan = self._plan()
        known = {parameter.names[0] for parameter in self._moved}
        movable = [member for member in self._movable({item.fqn for item in plan.items}) if member.names[0] in known]
        self._hold(self._slots, movable, plan, with_values=with_values)

    def _note_frozen(self, index: int) -> None:
        """Notes that of all slots only this one has the values of the frozen parameters."""
        self._frozen_in = {index}
        self._frozen_versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        return tuple(tensor._version for parameter in self._moved for tensor in parameter.watched)

    def step(self, lr_factor: float) -> None:
        """One update. The state before it stays complete until the next update."""
        if not self._slots:
            self.update.step(lr_factor)
            return
        if len(self._slots) == 1:
            assert self._store is not None
            self._add(self._store.live.make_second(keep_restored=self.keeps_restored))
        # Only now may the other buffer be overwritten: the vote has shown that all ranks have the current one complete.
        other = 1 - self._current
        self._slots[other].begin()
        if self._versions() != self._frozen_versions:
            self._note_frozen(self._current)
        if other not in self._frozen_in:
            self._copy_to(other, frozen=True)
            self._frozen_in.add(other)
        self._copy_to(other, frozen=False)
        self._point_to(other)
        self.update.step(lr_factor)
        self._take_back()
        self.settle()

    def finish(self, stamp: Stamp, extra_json: bytes) -> bool:
        """Mark the current buffer as complete. It stays so until the update after the next.

        False: the state is not in shared memory, or its slot was taken away."""
        if not self._slots:
            return False
        slot = self._slots[self._current]
        # Readers must not accept the part while these tensors are written.
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
        """Called after a restore: marks the buffer into which the state was read as complete.

        False: it was not read into another buffer. A buffer that holds the step already keeps its mark, because the
        others may hold no other snapshot than that one."""
        return self._is_filled_anew and self.finish(stamp, extra_json)

    def holds(self, source: SnapshotSource | None) -> bool:
        """Returns whether one of the buffers is this rank's part of the snapshot. Then the optimizer's state must not
        be materialised: others may read it at this moment."""
        return self._slot_of(source) is not None

    def _slot_of(self, source: SnapshotSource | None) -> int | None:
        if source is None or not self._slots:
            return None
        live = self.view.tensors().keys()
        for index, slot in enumerate(self._slots):
            if slot.is_of(source.generation, source.step) and slot.held <= live:
                return index
        return None

    def tensors_to_restore(self, source: SnapshotSource | None) -> dict[str, Tensor]:
        """Returns, before a restore, the tensors that must be overwritten.

        If one of the buffers holds the step to restore, it becomes the current one, and only what was not moved is
        returned. Otherwise all of the state is returned, and the current buffer is marked as incomplete, so that no
        other rank reads from it."""
        self._is_filled_anew = False
        index = self._slot_of(source)
        if index is not None:
            lacking = {item.fqn for item in self._plan().items} - self._slots[index].held
            if lacking:
                self.update.drop_state(lacking)
                self._current = index
                self._arrange(with_values=False)
            else:
                self._point_to(index)
            return {name: tensor for name, tensor in self.view.tensors().items() if name not in self._moved_names}
        if self._slots:
            self._slots[self._current].begin()
            self._is_filled_anew = True
            self._note_frozen(self._current)
            self._take_back()  # an update that was broken off, or made state, may have put other tensors there
        return self.view.tensors()

    def _copy_to(self, index: int, *, frozen: bool) -> None:
        """Copies the frozen parameters of the current slot, or all that is not frozen, to another one."""
        chosen = [number for number, member in enumerate(self._moved) if member.is_frozen is frozen]
        old, new = (
            [tensor for number in chosen for tensor in self._buffers[slot][number].tensors]
            for slot in (self._current, index)
        )
        if new:  # a rank may have no part of any parameter
            with torch.no_grad():
                torch._foreach_copy_(new, old)

    def _take_back(self) -> None:
        """Bring to the current buffer what the optimizer has put elsewhere."""
        for parameter, buffers in zip(self._moved, self._buffers[self._current], strict=True):
            if parameter.local_parameter is not None:
                parameter.take_back(self.update.optimizer.state.get(parameter.local_parameter, {}), buffers)

    def _point_to(self, index: int) -> None:
        """Point everything that refers to the state to the slot of this index."""
        self._current = index
        for parameter, buffers in zip(self._moved, self._buffers[index], strict=True):
            parameter.point_to(buffers)
        self.view.turn_to(index)

    def _movable(self, planned: Collection[str]) -> Iterator[_MovedParameter]:
        """Parameters of which this rank has a part, with their optimizer state."""
        optimizer = self.update.optimizer
        records = self._assembly.records()
        for name, parameter in self._assembly.named_parameters():
            local_parameter = self.update.local_parameter(parameter)
            part: Tensor = local_of(parameter) if isinstance(parameter, DTensor) else parameter
            state = {} if local_parameter is None else optimizer.state.get(local_parameter, {})
            own_state = {
                key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == part.shape
            }
            moved = _MovedParameter(
                names=(f"model.{name}", *(f"optim.{name}.{key}" for key in own_state)),
                record=records.get(id(parameter)),
                parameter=parameter,
                local=part,
                local_parameter=local_parameter,
                state=own_state,
            )
            if moved.has_expected_layout and all(member in planned for member in moved.names):
                yield moved


@dataclass(frozen=True, slots=True)
class _SlotBuffers:
    """The memory of one parameter in one of the slots."""

    flat: Tensor
    """FSDP's flat, padded shard, of which `parameter` is the beginning; or the whole parameter."""
    parameter: Tensor
    state: dict[str, Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.parameter, *self.state.values())

    def in_private_memory(self) -> _SlotBuffers:
        """Returns a copy in private memory."""
        flat = self.flat.clone()
        shard = flat[: self.parameter.numel()].view(self.parameter.shape)
        return _SlotBuffers(flat, shard, {key: tensor.clone() for key, tensor in self.state.items()})


@dataclass(frozen=True, slots=True)
class _MovedParameter:
    """One parameter, and everything that refers to its memory and to that of its optimizer state."""

    names: tuple[str, ...]
    """The names of the parameter and of its state."""
    record: Any
    """FSDP's record of the parameter; None if it is whole."""
    parameter: nn.Parameter
    """The model's."""
    local: Tensor
    """Its local tensor; the parameter itself if it is whole."""
    local_parameter: nn.Parameter | None
    """The optimizer's parameter; None if the optimizer does not have it, so it is frozen."""
    state: dict[str, Tensor]
    """Those of the parameter's shape."""

    @property
    def is_frozen(self) -> bool:
        return self.local_parameter is None

    @property
    def memory(self) -> Tensor:
        """The flat memory of the parameter; with FSDP its padded shard."""
        return self.local.detach().reshape(-1) if self.record is None else shard_memory(self.record)

    @property
    def watched(self) -> tuple[Tensor, ...]:
        """Tensors of a frozen parameter whose counts of changes in place tell whether it has changed."""
        return (self.parameter, self.local) if self.is_frozen else ()

    @property
    def refers(self) -> tuple[Tensor, ...]:
        """The tensors that share the parameter's memory."""
        return (self.local,) if self.local_parameter is None else (self.local, self.local_parameter)

    @property
    def has_expected_layout(self) -> bool:
        """True if all of its tensors are laid out as this module assumes."""
        flat, tensors = self.memory, (*self.refers, *self.state.values())
        return (
            all(tensor.is_cpu and tensor.is_contiguous() and tensor.shape == self.local.shape for tensor in tensors)
            and all(tensor.data_ptr() == flat.data_ptr() for tensor in self.refers)
            and flat.dtype == self.local.dtype
        )

    def buffers_in(self, slot: LiveSlot) -> _SlotBuffers:
        source = self.memory
        flat = slot.room(self.names[0], source.nbytes).view(source.dtype)
        shard = flat[: self.local.numel()].view(self.local.shape)
        state = {key: slot.view(name) for key, name in zip(self.state, self.names[1:], strict=True)}
        return _SlotBuffers(flat, shard, state)

    def copy_to(self, target: _SlotBuffers) -> None:
        for tensor, place in (
            (self.local, target.parameter),
            *((self.state[key], target.state[key]) for key in self.state),
        ):
            # A new arrangement leaves most tensors where they are.
            if tensor.data_ptr() != place.data_ptr():
                place.copy_(tensor)

    @torch.no_grad()
    def take_back(self, state: dict[str, object], target: _SlotBuffers) -> None:
        """Called after an update of the values in `target`: where the optimizer has given a parameter other memory, or
        has put another tensor into its `state`, the values go to the memory and the tensor that were there before."""
        pairs = [(self.refers[-1], target.parameter)]
        for key, tensor in self.state.items():
            kept = state.get(key)
            if isinstance(kept, Tensor) and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
                pairs.append((kept, target.state[key]))
                state[key] = tensor
        replaced = [(now, place) for now, place in pairs if now.data_ptr() != place.data_ptr()]
        copies = [now.clone() for now, _ in replaced]  # one's place may be the memory of another
        for copied, (_, place) in zip(copies, replaced, strict=True):
            place.copy_(copied)
        if replaced:
            self.point_to(target)

    def point_to(self, target: _SlotBuffers) -> None:
        if self.record is not None:
            set_shard_memory(self.record, target.flat)
        # Through `data`: the tensor objects stay the same, and with them everything that refers to them.
        for tensor in self.refers:
            tensor.data = target.parameter
        for key, tensor in self.state.items():
            tensor.data = target.state[key]
