"""When which values of buffers are in the modules of a loop, and what travels with its votes. What they become: see
engine/step/buffer_rule.py; the weights are those of `backward`, divided by their sum. SyncBatchNorm counts on rank 0
alone: the other ranks compute its micro-batches with it.

Every micro-batch begins with B, of which a copy is kept. So a rank that leaves a broken group has the buffers of the
last complete step, whatever its forward passes have done since. What the loop changes between an update and the next
micro-batch is its own, and becomes B; if another backward pass follows in the same micro-batch, what has changed since
the update belongs to the next one. Padding micro-batches, and those after the last update of a step, leave no trace.
Only buffers that checkpoints hold are looked after. The order of the micro-batches of an update is that of the ranks,
then of each rank's own; with one pass over the global batch that is the order of one process.

Which buffers have changed, and how often each norm was called on which rank, travels with the vote; only if there are
any, one more small all-reduce follows. Nothing here waits for a GPU: a change is computed of every buffer that is small
or known to change, whether there is one or not, and is 0 if there is none. A large buffer is not expected to change
after the first updates without torch's notice; if it does, the vote tells so. Called by `Run` on the training thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.parallel.device_copies import to_device
from shoal_workers.engine.step.buffer_rule import (
    NUM_THOROUGH,
    Buffer,
    compute_values,
    find_buffers,
    find_norms,
    folds_statistics,
)


@dataclass(slots=True, eq=False)
class _Buffer(Buffer):
    """A buffer of a loop."""

    base: Tensor = field(kw_only=True)
    """B."""
    is_synchronised: bool = False
    """The forward pass changes it alike on all ranks."""

    @property
    def before(self) -> Tensor:
        return self.base

    @property
    def is_computed(self) -> bool:
        """Its change is computed, whether there is one or not."""
        return self.is_changing or self.is_small

    def differs(self, now: Tensor | None) -> bool:
        """Compares values, because torch does not count all writes. Waits for the device."""
        return now is not self.original or not torch.equal(self.original, self.base)

    def restore(self) -> None:
        """B is in the module."""
        self.install(self.original)
        self.original.data.copy_(self.base)  # not counted by torch: a backward pass may still come
        self.version = self.original._version

    def adopt(self) -> None:
        """What is in the module is B from now on."""
        now = self.current
        if now is not None and now is not self.original:
            self.original.data.copy_(now)
            self.install(self.original)
        self.base.copy_(self.original)
        self.version = self.original._version


class LoopBuffers:
    """The buffers of what is tracked, on one rank in one generation."""

    def __init__(self, modules: Mapping[str, nn.Module], rank: int, world_size: int, device: torch.device) -> None:
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._num_updates = 0
        self._changes: list[Tensor] = []
        """Bool scalars: the loop itself has changed a buffer since `forget_changes`."""
        named = [(f"{name}/", module) for name, module in modules.items()]
        self._buffers, self._norms = find_buffers(named, _make_buffer, _is_saved, _is_norm)
        self._is_open = False
        self._is_real = False
        self._weight = 0.0
        self._pending: list[tuple[_Buffer, Tensor]] = []

    @property
    def paths(self) -> frozenset[str]:
        """The names of the buffers in the tracked state."""
        return frozenset(buffer.name for buffer in self._buffers)

    def begin_micro_batch(self, *, is_real: bool) -> None:
        """Ends the one before."""
        if not self._buffers:
            return
        if self._is_open:
            self._end_micro_batch()
        else:
            self.adopt()
        self._is_open, self._is_real, self._weight = True, is_real, 0.0

    def weigh(self, weight: float) -> None:
        """`backward` was called, and the micro-batch counts with this weight. After an update within a micro-batch it
        goes on: what its forward passes have changed since belongs to the next update."""
        self._is_open = self._is_open or bool(self._buffers)
        self._weight = weight

    def send(self) -> Tensor:
        """Ends the last micro-batch before an update. Returns this rank's numbers for the vote, equally many on all
        ranks: float64 on the device."""
        if self._is_open:
            self._end_micro_batch()
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        changed = [zero if buffer.has_changed is None else buffer.has_changed.double() for buffer in self._buffers]
        calls = [zero if norm.num_calls is None else norm.num_calls.double() for norm in self._norms]
        before = [zero] * (self._rank * len(calls))
        after = [zero] * ((self._world_size - self._rank - 1) * len(calls))
        numbers = [to_device(number, self._device) for number in (*changed, *before, *calls, *after)]
        return torch.stack(numbers) if numbers else zero.new_zeros(0)

    @torch.no_grad()
    def add_up(self, totals: Sequence[float], weight: float) -> None:
        """Called by all ranks with the sum of their numbers: computes B'. `weight`: of all micro-batches.

        Raises:
            ValueError: a large buffer has changed without torch's notice, and did not do so in the first updates.
        """
        num = len(self._buffers)
        changed = [buffer for buffer, count in zip(self._buffers, totals[:num], strict=True) if count]
        for buffer in changed:
            if not buffer.is_computed and buffer.has_changed is not None:
                raise ValueError(
                    f"the forward pass changes the buffer {buffer.name.replace('/', '.')} through `.data` or from "
                    "other code than torch's, and did not do so in the first two updates, so its changes would be "
                    "lost. Write to it in place (buffer.copy_(...)), or register it with persistent=False if it is a "
                    "cache."
                )
            buffer.is_changing = True
        self._num_updates += 1
        self._pending = []
        if changed:
            calls = torch.tensor(totals[num:], dtype=torch.float64).view(self._world_size, len(self._norms))
            add_up = all_ranks().all_reduce_small
            values = compute_values(changed, self._norms, calls, self._rank, add_up, weight)
            self._pending = [*zip(changed, values, strict=True)]
        self._forget()

    def apply(self) -> None:
        """Called when the update is sure: B' is in the modules."""
        for buffer, value in self._pending:
            buffer.base.copy_(value)
            buffer.restore()
        self._pending = []

    def restore(self) -> None:
        """B is in the modules: what micro-batches have changed since the last update is dropped."""
        if self._is_open:
            for buffer in self._buffers:
                buffer.restore()
            self._forget()
        self._is_open = False

    @torch.no_grad()
    def adopt(self) -> None:
        """What is in the modules is B from now on, if no micro-batch is under way."""
        for buffer in () if self._is_open else self._buffers:
            now = buffer.current
            if now is None:
                continue
            if now is not buffer.original or (now.is_cpu and not buffer.is_computed):
                if buffer.differs(now):
                    self._changes.append(torch.ones((), dtype=torch.bool))
                    buffer.adopt()
                continue
            self._changes.append((now != buffer.base).any())
            buffer.adopt()

    def have_changed(self) -> bool:
        """Whether the loop itself has changed a buffer since the last step. Waits for the device."""
        return any(bool(change) for change in self._changes)

    def forget_changes(self) -> None:
        """A step ends: what the buffers are belongs to it."""
        self._changes = []

    def _forget(self) -> None:
        for buffer in self._buffers:
            buffer.total = buffer.has_changed = None
        for norm in self._norms:
            norm.num_calls = None

    @torch.no_grad()
    def _end_micro_batch(self) -> None:
        self._is_open = False
        changed = [(buffer, now) for buffer in self._buffers if self._may_have_changed(buffer, now := buffer.current)]
        if self._is_real:
            counted = [(buffer, now) for buffer, now in changed if not (buffer.is_synchronised and self._rank)]
            for buffer, now in counted:
                self._refuse_other_shape(buffer, now)
            calls = {id(norm): norm.count_calls() for norm in find_norms(buffer for buffer, _ in counted)}
            for buffer, now in counted:
                assert now is not None
                buffer.note_change((now != buffer.base).any())
                buffer.add(now, self._weight, calls.get(id(buffer.norm)))
        for buffer, _ in changed:
            buffer.restore()

    def _may_have_changed(self, buffer: _Buffer, now: Tensor | None) -> bool:
        if buffer.is_computed:
            return True
        if now is not buffer.original:
            buffer.is_changing = True  # another tensor shows without a comparison
            return True
        if buffer.original.is_cpu or self._num_updates < NUM_THOROUGH or buffer.original._version != buffer.version:
            buffer.is_changing = buffer.differs(now)
            return buffer.is_changing
        if self._is_real:
            buffer.note_change((buffer.original != buffer.base).any())
        return False

    @staticmethod
    def _refuse_other_shape(buffer: _Buffer, now: Tensor | None) -> None:
        original = buffer.original
        if now is None or now.shape != original.shape or now.dtype != original.dtype:
            shape = "nothing" if now is None else f"{now.dtype} {list(now.shape)}"
            raise ValueError(
                f"the forward pass changes the buffer {buffer.name.replace('/', '.')} from {original.dtype} "
                f"{list(original.shape)} to {shape}, and such changes cannot be added up. Give it its final shape when "
                "it is made, or register it with persistent=False if it is a cache."
            )


def _make_buffer(module: nn.Module, name: str, tensor: Tensor) -> _Buffer:
    is_synchronised = isinstance(module, nn.SyncBatchNorm)
    return _Buffer(name, tensor, base=tensor.detach().clone(), is_synchronised=is_synchronised)


def _is_saved(module: nn.Module, key: str, tensor: Tensor) -> bool:
    return key not in module._non_persistent_buffers_set and tensor.layout is torch.strided


def _is_norm(module: nn.Module) -> bool:
    return folds_statistics(module) or isinstance(module, nn.SyncBatchNorm)
