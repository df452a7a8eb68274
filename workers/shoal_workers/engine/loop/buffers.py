"""Buffers that the forward passes of a loop change (BatchNorm's statistics, moving averages, counters): one rule at
every size, that of tasks (engine/step/buffers.py). Hides when which values are in the modules.

    buffers B after an update | micro-batch 0: B -> V0 | micro-batch 1: B -> V1 | ... | update: B' on every rank alike

    floating point      B' = B + sum of weight x (V - B); the weights are those of `backward`, divided by their sum
    integers            B' = B + sum of (V - B); bool: the other value, if any micro-batch has changed it
    BatchNorm           B' is what one process gets that runs the micro-batches one after the other
    SyncBatchNorm       the same, of the micro-batches of rank 0: the other ranks compute those with it

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal_workers.engine.group.direct_collectives import all_reduce_small
from shoal_workers.engine.parallel.device_copies import to_device
from shoal_workers.engine.step.buffers import as_sum, folds, from_sum
from shoal_workers.torch_internals import BatchNorm

_SMALL_BYTES = 64 << 10
_THOROUGH_UPDATES = 2
"""First updates of a generation, in which large buffers are compared by value as well."""


@dataclass(slots=True, eq=False)
class _Norm:
    module: nn.Module
    counter: _Buffer | None = None
    statistics: list[_Buffer] = field(default_factory=list)
    num_calls: Tensor | None = None
    """Calls in this rank's micro-batches since the last update: an int64 scalar. None means none."""

    @property
    def momentum(self) -> float | None:
        """As the loop has set it last. None if its statistics are a cumulative average."""
        momentum: float | None = getattr(self.module, "momentum", None)
        return momentum


@dataclass(slots=True, eq=False)
class _Buffer:
    path: str
    home: Tensor
    """What is in the module between micro-batches."""
    base: Tensor
    """B."""
    places: list[tuple[nn.Module, str]]
    is_synchronised: bool = False
    """The forward pass changes it alike on all ranks."""
    norm: _Norm | None = None
    total: Tensor | None = None
    """This rank's share of the sum."""
    is_known: bool = False
    """It has changed in some update."""
    has_changed: Tensor | None = None
    """A bool scalar on the device, of this rank's micro-batches since the last update. None means False."""
    version: int = 0
    """torch's count of changes of `home` when the micro-batch began."""

    @property
    def is_computed(self) -> bool:
        """Its change is computed, whether there is one or not."""
        return self.is_known or self.norm is not None or self.home.nbytes <= _SMALL_BYTES

    @property
    def now(self) -> Tensor | None:
        buffers = (module._buffers.get(key) for module, key in self.places)
        return next((slot for slot in buffers if slot is not self.home), self.home)

    def differs(self, now: Tensor | None) -> bool:
        """Compares values, because torch does not count all writes. Waits for the device."""
        return now is not self.home or not torch.equal(self.home, self.base)

    def note(self, has_changed: Tensor) -> None:
        self.has_changed = has_changed if self.has_changed is None else self.has_changed | has_changed

    def restore(self) -> None:
        """B is in the module."""
        for module, key in self.places:
            module._buffers[key] = self.home
        self.home.data.copy_(self.base)  # not counted by torch: a backward pass may still come
        self.version = self.home._version

    def keep(self) -> None:
        """What is in the module is B from now on."""
        now = self.now
        if now is not None and now is not self.home:
            self.home.data.copy_(now)
            for module, key in self.places:
                module._buffers[key] = self.home
        self.base.copy_(self.home)
        self.version = self.home._version


class LoopBuffers:
    """The buffers of what is tracked, on one rank in one generation."""

    def __init__(self, modules: Mapping[str, nn.Module], rank: int, world_size: int, device: torch.device) -> None:
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._num_updates = 0
        self._changes: list[Tensor] = []
        """Bool scalars: the loop itself has changed a buffer since `forget_changes`."""
        self._buffers: list[_Buffer] = []
        self._norms: list[_Norm] = []
        for name, module in modules.items():
            self._find(name, module)
        self._is_open = False
        self._is_real = False
        self._weight = 0.0
        self._pending: list[tuple[_Buffer, Tensor]] = []

    @property
    def paths(self) -> frozenset[str]:
        """The names of the buffers in the tracked state."""
        return frozenset(buffer.path for buffer in self._buffers)

    def begin_micro_batch(self, *, is_real: bool) -> None:
        """Ends the one before."""
        if not self._buffers:
            return
        if self._is_open:
            self._end_micro_batch()
        else:
            self.keep()
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
        num, width = len(self._buffers), len(self._norms)
        changed = [buffer for buffer, count in zip(self._buffers, totals[:num], strict=True) if count]
        for buffer in changed:
            if not buffer.is_computed and buffer.has_changed is not None:
                raise ValueError(
                    f"the forward pass changes the buffer {buffer.path.replace('/', '.')} through `.data` or from "
                    "other code than torch's, and did not do so in the first two updates, so its changes would be "
                    "lost. Write to it in place (buffer.copy_(...)), or register it with persistent=False if it is a "
                    "cache."
                )
            buffer.is_known = True
        self._num_updates += 1
        self._pending = []
        if changed:
            calls = [totals[num + rank * width : num + (rank + 1) * width] for rank in range(self._world_size)]
            num_calls = {id(norm): [int(call[i]) for call in calls] for i, norm in enumerate(self._norms)}
            shares = [self._share(buffer, num_calls, weight).reshape(-1) for buffer in changed]
            flat = torch.cat(shares)
            if self._world_size > 1:
                all_reduce_small(flat)
            for buffer, total in zip(changed, torch.split(flat, [len(share) for share in shares]), strict=True):
                self._pending.append((buffer, _result(buffer, total, num_calls)))
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
    def keep(self) -> None:
        """What is in the modules is B from now on, if no micro-batch is under way."""
        for buffer in () if self._is_open else self._buffers:
            now = buffer.now
            if now is None:
                continue
            if now is not buffer.home or (now.is_cpu and not buffer.is_computed):
                if buffer.differs(now):
                    self._changes.append(torch.ones((), dtype=torch.bool))
                    buffer.keep()
                continue
            self._changes.append((now != buffer.base).any())
            buffer.keep()

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

    def _find(self, name: str, module: nn.Module) -> None:
        known = {id(buffer.home): buffer for buffer in self._buffers}
        for prefix, inner in module.named_modules():
            norm: _Norm | None = None
            for key, tensor in inner._buffers.items():
                if tensor is None or key in inner._non_persistent_buffers_set or tensor.layout is not torch.strided:
                    continue
                if id(tensor) in known:
                    known[id(tensor)].places.append((inner, key))
                    continue
                path = f"{name}/{prefix}.{key}" if prefix else f"{name}/{key}"
                is_synchronised = isinstance(inner, nn.SyncBatchNorm)
                buffer = _Buffer(path, tensor, tensor.detach().clone(), [(inner, key)], is_synchronised)
                known[id(tensor)] = buffer
                self._buffers.append(buffer)
                if not folds(inner) and not is_synchronised:
                    continue
                if norm is None:
                    norm = _Norm(inner)
                    self._norms.append(norm)
                if key in ("running_mean", "running_var"):
                    buffer.norm = norm
                    norm.statistics.append(buffer)
                elif key == "num_batches_tracked" and isinstance(inner, BatchNorm):
                    norm.counter = buffer

    @torch.no_grad()
    def _end_micro_batch(self) -> None:
        self._is_open = False
        changed = [(buffer, now) for buffer in self._buffers if self._may_have_changed(buffer, now := buffer.now)]
        if self._is_real:
            counted = [(buffer, now) for buffer, now in changed if not (buffer.is_synchronised and self._rank)]
            for buffer, now in counted:
                self._refuse_other_shape(buffer, now)
                assert now is not None
                buffer.note((now != buffer.base).any())
            calls = {id(norm): _calls(norm, dict(counted)) for norm in _norms_of(counted)}
            for buffer, now in counted:
                assert now is not None
                self._take(buffer, now, calls)
            for norm in _norms_of(counted):
                called = calls[id(norm)]
                norm.num_calls = called if norm.num_calls is None else norm.num_calls + called
        for buffer, _ in changed:
            buffer.restore()

    def _may_have_changed(self, buffer: _Buffer, now: Tensor | None) -> bool:
        if buffer.is_computed or now is not buffer.home:
            return True
        if buffer.home.is_cpu or self._num_updates < _THOROUGH_UPDATES or buffer.home._version != buffer.version:
            buffer.is_known = buffer.differs(now)
            return buffer.is_known
        if self._is_real:
            buffer.note((buffer.home != buffer.base).any())
        return False

    @staticmethod
    def _refuse_other_shape(buffer: _Buffer, now: Tensor | None) -> None:
        home = buffer.home
        if now is None or now.shape != home.shape or now.dtype != home.dtype:
            shape = "nothing" if now is None else f"{now.dtype} {list(now.shape)}"
            raise ValueError(
                f"the forward pass changes the buffer {buffer.path.replace('/', '.')} from {home.dtype} "
                f"{list(home.shape)} to {shape}, and such changes cannot be added up. Give it its final shape when it "
                "is made, or register it with persistent=False if it is a cache."
            )

    def _take(self, buffer: _Buffer, now: Tensor, calls: Mapping[int, Tensor]) -> None:
        home, norm = buffer.home, buffer.norm
        base, value = as_sum(buffer.base), as_sum(now)
        total = torch.zeros_like(base, dtype=torch.float64) if buffer.total is None else buffer.total
        if norm is not None and norm.momentum is not None:
            kept = (1 - norm.momentum) ** calls[id(norm)].double()
            total = kept * total + (value - kept * base)
        elif norm is not None:
            before = _num_before(norm)
            total = total + (before + calls[id(norm)]) * value - before * base
        elif home.dtype is torch.bool:
            total = total + (now != buffer.base)
        elif home.is_floating_point() or home.is_complex():
            total = total + self._weight * (value - base)
        else:
            total = total + (value - base)
        buffer.total = total

    def _share(self, buffer: _Buffer, num_calls: Mapping[int, list[int]], weight: float) -> Tensor:
        """Returns this rank's summand."""
        base, norm = as_sum(buffer.base), buffer.norm
        total = torch.zeros_like(base, dtype=torch.float64) if buffer.total is None else buffer.total
        if norm is not None and norm.momentum is not None:
            return total * (1 - norm.momentum) ** sum(num_calls[id(norm)][self._rank + 1 :])
        is_mean = norm is None and (buffer.home.is_floating_point() or buffer.home.is_complex())
        return total / weight if is_mean else total


def _norms_of(changed: Iterable[tuple[_Buffer, Tensor | None]]) -> list[_Norm]:
    return list({id(buffer.norm): buffer.norm for buffer, _ in changed if buffer.norm is not None}.values())


def _calls(norm: _Norm, now: Mapping[_Buffer, Tensor | None]) -> Tensor:
    """How often a norm was called in a micro-batch: an int64 scalar. Once at least if its statistics have changed."""
    differ = [(value != one.base).any() for one in norm.statistics if (value := now.get(one)) is not None]
    is_called = torch.stack(differ).any().to(torch.int64)
    counter = norm.counter
    counted = None if counter is None else counter.now
    if counter is None or counted is None:
        return is_called
    return torch.maximum(counted - counter.base, is_called)


def _num_before(norm: _Norm) -> Tensor | float:
    return 0.0 if norm.counter is None else norm.counter.base.double()


def _result(buffer: _Buffer, total: Tensor, num_calls: Mapping[int, list[int]]) -> Tensor:
    """B'. `total`: the summands of all ranks."""
    base, norm = as_sum(buffer.base), buffer.norm
    total = total.view(base.shape)
    if norm is not None and norm.momentum is not None:
        return from_sum((1 - norm.momentum) ** sum(num_calls[id(norm)]) * base + total, buffer.base)
    if norm is not None:
        before = _num_before(norm)
        return from_sum((before * base + total) / (before + sum(num_calls[id(norm)])), buffer.base)
    if buffer.base.dtype is torch.bool:
        return buffer.base ^ (total > 0)
    return from_sum(base + total, buffer.base)
