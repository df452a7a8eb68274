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
any, one more small all-reduce follows. Called by `Run` on the training thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal_workers.engine.group.direct_collectives import all_reduce_small
from shoal_workers.engine.step.buffers import as_sum, folds, from_sum
from shoal_workers.torch_internals import BatchNorm


@dataclass(slots=True, eq=False)
class _Norm:
    module: nn.Module
    counter: _Buffer | None = None
    statistics: list[_Buffer] = field(default_factory=list)
    num_calls: int = 0
    """In this rank's micro-batches since the last update."""

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

    @property
    def now(self) -> Tensor | None:
        buffers = (module._buffers.get(key) for module, key in self.places)
        return next((slot for slot in buffers if slot is not self.home), self.home)

    def has_changed(self, now: Tensor | None) -> bool:
        """Compares values, because torch does not count all writes."""
        return now is not self.home or not torch.equal(self.home, self.base)

    def restore(self) -> None:
        """B is in the module."""
        for module, key in self.places:
            module._buffers[key] = self.home
        self.home.data.copy_(self.base)  # not counted by torch: a backward pass may still come

    def keep(self) -> None:
        """What is in the module is B from now on."""
        now = self.now
        if now is not None and now is not self.home:
            self.home.data.copy_(now)
            for module, key in self.places:
                module._buffers[key] = self.home
        self.base.copy_(self.home)


class LoopBuffers:
    """The buffers of what is tracked, on one rank in one generation."""

    def __init__(self, modules: Mapping[str, nn.Module], rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
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

    def begin_micro_batch(self, *, is_real: bool) -> bool:
        """Ends the one before. Returns whether the loop itself has changed a buffer since the last update or step."""
        if not self._buffers:
            return False
        is_changed = False
        if self._is_open:
            self._end_micro_batch()
        else:
            is_changed = self.keep()
        self._is_open, self._is_real, self._weight = True, is_real, 0.0
        return is_changed

    def weigh(self, weight: float) -> None:
        """`backward` was called, and the micro-batch counts with this weight. After an update within a micro-batch it
        goes on: what its forward passes have changed since belongs to the next update."""
        self._is_open = self._is_open or bool(self._buffers)
        self._weight = weight

    def send(self) -> list[float]:
        """Ends the last micro-batch before an update. Returns this rank's numbers for the vote, equally many on all
        ranks."""
        if self._is_open:
            self._end_micro_batch()
        calls = [0.0] * (self._world_size * len(self._norms))
        first = self._rank * len(self._norms)
        calls[first : first + len(self._norms)] = [float(norm.num_calls) for norm in self._norms]
        return [*(float(buffer.total is not None) for buffer in self._buffers), *calls]

    @torch.no_grad()
    def add_up(self, totals: Sequence[float], weight: float) -> None:
        """Called by all ranks with the sum of their numbers: computes B'. `weight`: of all micro-batches."""
        num, width = len(self._buffers), len(self._norms)
        changed = [buffer for buffer, count in zip(self._buffers, totals[:num], strict=True) if count]
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
        for buffer in self._buffers:
            buffer.total = None
        for norm in self._norms:
            norm.num_calls = 0

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
                buffer.total = None
            for norm in self._norms:
                norm.num_calls = 0
        self._is_open = False

    def keep(self) -> bool:
        """What is in the modules is B from now on, if no micro-batch is under way. Returns whether it has changed."""
        changed = [] if self._is_open else [buffer for buffer in self._buffers if buffer.has_changed(buffer.now)]
        for buffer in changed:
            buffer.keep()
        return bool(changed)

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
        changed = [(buffer, now) for buffer in self._buffers if buffer.has_changed(now := buffer.now)]
        if self._is_real:
            counted = [(buffer, now) for buffer, now in changed if not (buffer.is_synchronised and self._rank)]
            calls = {id(norm): self._calls(norm) for norm in _norms_of(counted)}
            for buffer, now in counted:
                self._take(buffer, now, calls)
            for norm in _norms_of(counted):
                norm.num_calls += calls[id(norm)]
        for buffer, _ in changed:
            buffer.restore()

    @staticmethod
    def _calls(norm: _Norm) -> int:
        counter = norm.counter
        if counter is None or (now := counter.now) is None:
            return 1
        return max(1, int(now) - int(counter.base))

    def _take(self, buffer: _Buffer, now: Tensor | None, calls: Mapping[int, int]) -> None:
        home, norm = buffer.home, buffer.norm
        if now is None or now.shape != home.shape or now.dtype != home.dtype:
            shape = "nothing" if now is None else f"{now.dtype} {list(now.shape)}"
            raise ValueError(
                f"the forward pass changes the buffer {buffer.path.replace('/', '.')} from {home.dtype} "
                f"{list(home.shape)} to {shape}, and such changes cannot be added up. Give it its final shape when it "
                "is made, or register it with persistent=False if it is a cache."
            )
        base, value = as_sum(buffer.base), as_sum(now)
        total = torch.zeros_like(base, dtype=torch.float64) if buffer.total is None else buffer.total
        if norm is not None and norm.momentum is not None:
            kept = (1 - norm.momentum) ** calls[id(norm)]
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


def _num_before(norm: _Norm) -> int:
    return 0 if norm.counter is None else int(norm.counter.base)


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
