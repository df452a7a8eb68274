"""The rule for buffers that forward passes change (BatchNorm's statistics, moving averages, counters), of tasks and of
loops. Hides how the changes of micro-batches on several ranks become one value.

    buffers B before an update | micro-batch 0: B -> V0 | micro-batch 1: B -> V1 | ... | update: B' on every rank alike

    floating point      B' = B + sum of weight x (V - B); the weights are those of the micro-batches' losses
    integers            B' = B + sum of (V - B); bool: the other value, if any micro-batch has changed it
    BatchNorm           its training outputs do not depend on its statistics, so B' is what one process gets that runs
                        the micro-batches one after the other: r -> (1 - m)^k r + (V - (1 - m)^k B) for k calls that
                        turn B into V; the cumulative average of n0 calls:
                        r = (n0 B + sum of ((n0 + k) V - n0 B)) / (n0 + all k)

A rank adds the changes of its own micro-batches in their order (`add`); the caller sums the shares of all ranks
(`compute_share`); `compute_value` returns B'. Nothing here communicates or waits for a device. When which values are
in the modules is hidden in `StepBuffers` (tasks), `LoopBuffers` (loops) and the plain loop of a proof, which call this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from shoal_workers.torch_internals import BatchNorm, InstanceNorm

SMALL_BYTES = 64 << 10
"""Changes of larger buffers are computed only if they are known to change."""
NUM_THOROUGH = 2
"""First updates of a generation in which large buffers of a loop are compared by value, because torch does not count
writes through `data`. Later the vote tells."""


@dataclass(slots=True, eq=False)
class Norm:
    """A module whose statistics are folded in the order of the micro-batches."""

    module: nn.Module
    counter: Buffer | None = None
    """Its num_batches_tracked."""
    buffers: list[Buffer] = field(default_factory=list)
    """Its statistics."""
    num_calls: Tensor | None = None
    """Calls in this rank's micro-batches since the last update: an int64 scalar. None means none."""

    @property
    def momentum(self) -> float | None:
        """Weight of the newest batch, as the program has set it last; None if they are a cumulative average."""
        momentum: float | None = getattr(self.module, "momentum", None)
        return momentum

    @property
    def num_before(self) -> Tensor | float:
        return 0.0 if self.counter is None else self.counter.before.double()

    def count_calls(self) -> Tensor:
        """Counts its calls in the micro-batch that ends, by its counter if it has one: an int64 scalar."""
        if self.counter is not None and (now := self.counter.current) is not None:
            calls = now - self.counter.before
        else:
            pairs = [(now, buffer.before) for buffer in self.buffers if (now := buffer.current) is not None]
            differs = [unequal(now, before) for now, before in pairs if now.shape == before.shape]
            zero = self.buffers[0].original.new_zeros((), dtype=torch.int64)
            calls = torch.stack(differs).any().to(torch.int64) if differs else zero
        self.num_calls = calls if self.num_calls is None else self.num_calls + calls
        return calls


@dataclass(slots=True, eq=False)
class Buffer:
    """One buffer, which may be attached to several modules."""

    name: str
    original: Tensor
    """The buffer itself; between steps it is in all modules."""
    attach_points: list[tuple[nn.Module, str]] = field(default_factory=list)
    parts: set[int] = field(default_factory=set)
    """Numbers of the models that have it."""
    norm: Norm | None = None
    is_saved: bool = False
    """Checkpoints hold it."""
    is_changing: bool = False
    """It has changed before, on any rank."""
    version: int = 0
    """torch's count of changes of `installed` when the micro-batch began."""
    total: Tensor | None = None
    """Sum of this rank's changes since the last update, weighted; float64 or int64."""
    has_changed: Tensor | None = None
    """A bool scalar on the device, of this rank's micro-batches since the last update. None means False."""

    @property
    def before(self) -> Tensor:
        """B."""
        return self.original

    @property
    def installed(self) -> Tensor:
        """What is in the modules when a micro-batch begins."""
        return self.original

    @property
    def current(self) -> Tensor | None:
        """What the modules have now: another tensor than `installed` if the forward pass has put one there."""
        buffers = [module._buffers.get(key) for module, key in self.attach_points]
        return next((buffer for buffer in buffers if buffer is not self.installed), self.installed)

    @property
    def is_small(self) -> bool:
        return self.original.nbytes <= SMALL_BYTES or self.norm is not None

    def install(self, tensor: Tensor) -> None:
        for module, key in self.attach_points:
            module._buffers[key] = tensor

    def note_change(self, has_changed: Tensor) -> None:
        self.has_changed = has_changed if self.has_changed is None else self.has_changed | has_changed

    def add(self, now: Tensor, weight: float, calls: Tensor | None) -> None:
        """Adds the change of a micro-batch. `calls`: those of its norm in it."""
        before, total, norm = as_sum(self.before), self._total(), self.norm
        if norm is None:
            change = compute_change(now, self.before)
            self.total = total.add_(change * weight if is_real(now) else change)
            return
        assert calls is not None
        if norm.momentum is None:
            self.total = total + ((norm.num_before + calls) * as_sum(now) - norm.num_before * before)
        else:
            kept = (1 - norm.momentum) ** calls.double()
            self.total = kept * total + (as_sum(now) - kept * before)

    def compute_share(self, num_later: Tensor | int = 0) -> Tensor:
        """Returns this rank's summand. `num_later`: calls of its norm on the ranks after this one."""
        if self.norm is None or self.norm.momentum is None:
            return self._total()
        return self._total() * (1 - self.norm.momentum) ** num_later

    def compute_value(self, total: Tensor, num_calls: Tensor | int = 0) -> Tensor:
        """B'. `total`: the summands of all ranks; `num_calls`: calls of its norm on all ranks."""
        before, norm = as_sum(self.before), self.norm
        total = total.view(before.shape)
        if self.before.dtype is torch.bool:
            return self.before ^ (total > 0)
        if norm is None:
            return from_sum(before + total, self.before)
        calls = torch.as_tensor(num_calls, dtype=torch.float64, device=before.device)
        if norm.momentum is not None:
            return from_sum((1 - norm.momentum) ** calls * before + total, self.before)
        value = (norm.num_before * before + total) / (norm.num_before + calls)
        return from_sum(torch.where(calls > 0, value, before), self.before)

    def _total(self) -> Tensor:
        return torch.zeros_like(as_sum(self.before)) if self.total is None else self.total


B = TypeVar("B", bound=Buffer)


def find_buffers(
    models: Iterable[tuple[str, nn.Module]],
    make: Callable[[nn.Module, str, Tensor], B],
    is_wanted: Callable[[nn.Module, str, Tensor], bool],
    is_norm: Callable[[nn.Module], bool],
) -> tuple[list[B], list[Norm]]:
    """The buffers of some models, and the norms among their modules, in an order that all ranks have.

    Args:
        models: each with what its names begin with.
        make: called with a module, a name and a tensor.
        is_wanted: called with a module, its attribute and a tensor.
        is_norm: whether a module's statistics are folded.
    """
    known: dict[int, B] = {}
    norms: dict[int, Norm] = {}
    for number, (begin, model) in enumerate(models):
        for prefix, module in model.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is None or not is_wanted(module, key, tensor):
                    continue
                if id(tensor) not in known:
                    known[id(tensor)] = make(module, begin + (f"{prefix}.{key}" if prefix else key), tensor)
                buffer = known[id(tensor)]
                buffer.parts.add(number)
                buffer.is_saved |= key not in module._non_persistent_buffers_set
                if (module, key) not in buffer.attach_points:
                    buffer.attach_points.append((module, key))
                if not is_norm(module):
                    continue
                if key in ("running_mean", "running_var"):
                    buffer.norm = norms.setdefault(id(module), Norm(module))
                    if buffer not in buffer.norm.buffers:
                        buffer.norm.buffers.append(buffer)
                elif key == "num_batches_tracked" and id(module) in norms and isinstance(module, BatchNorm):
                    norms[id(module)].counter = buffer
    return list(known.values()), list(norms.values())


def compute_values(
    buffers: Sequence[Buffer],
    norms: Sequence[Norm],
    calls: Tensor,
    rank: int,
    add_up: Callable[[Tensor], object],
    weight: float = 1.0,
) -> list[Tensor]:
    """B' of each buffer, on all ranks alike: one sum over the ranks, in double precision.

    Args:
        calls: those of each of `norms` on each rank, of shape (ranks, norms).
        add_up: replaces a vector by its sum over all ranks.
        weight: what the changes of all ranks are divided by, except those of norms and integers.
    """
    of_norms = {id(norm): (calls[rank + 1 :, n].sum(), calls[:, n].sum()) for n, norm in enumerate(norms)}
    numbers = [of_norms.get(id(buffer.norm), (0, 0)) for buffer in buffers]
    shares = []
    for buffer, (later, _) in zip(buffers, numbers, strict=True):
        share = buffer.compute_share(later).double().reshape(-1)
        shares.append(share / weight if buffer.norm is None and is_real(buffer.original) else share)
    flat = torch.cat(shares)
    add_up(flat)
    totals = torch.split(flat, [len(share) for share in shares])
    return [
        buffer.compute_value(total.to(as_sum(buffer.original).dtype), num_calls)
        for buffer, total, (_, num_calls) in zip(buffers, totals, numbers, strict=True)
    ]


def find_norms(buffers: Iterable[Buffer]) -> list[Norm]:
    return list({id(buffer.norm): buffer.norm for buffer in buffers if buffer.norm is not None}.values())


def folds_statistics(module: nn.Module) -> bool:
    """Return whether a module's training outputs do not depend on its statistics. A subclass with a forward of its own
    is not known."""
    forward = type(module).forward
    return forward is BatchNorm.forward or forward is InstanceNorm.forward


def is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def as_sum(tensor: Tensor) -> Tensor:
    """The tensor in the type in which changes are added up."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().to(torch.complex128))
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else torch.int64)


def from_sum(value: Tensor, like: Tensor) -> Tensor:
    return (torch.view_as_complex(value.contiguous()) if like.is_complex() else value).to(like.dtype)


def compute_change(now: Tensor, before: Tensor) -> Tensor:
    return (now != before).to(torch.int64) if before.dtype is torch.bool else as_sum(now) - as_sum(before)


def unequal(now: Tensor, before: Tensor) -> Tensor:
    """Return whether any element differs, as a bool scalar on the tensors' device; nan equals nan."""
    if now.is_cpu and now.nbytes > SMALL_BYTES and torch.equal(now, before):  # without temporary tensors
        return torch.zeros((), dtype=torch.bool)
    return ((now != before) & ~((now != now) & (before != before))).any()
