"""Gradients in buckets: those of several parameters are one all-reduce, which may begin while a backward pass runs.

What is sent is a copy: `grad` stays what autograd has made until `give`. A bucket is always made of the same parameters
in the same order, so the sums have the same bits whether they were sent early or not. Used by the gradients of a loop
and by the plain replicas of a task, as are the norm of gradients and the factor by which they are clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_workers.engine.group.all_ranks import RankGrid, Reduction
from shoal_workers.engine.group.rounded_sums import RoundedAllReduce, RoundedSums
from shoal_workers.torch_internals import overlaps_itself

FIRST_BUCKET_BYTES = 1 << 20
"""Small, so that something is under way soon; as in DistributedDataParallel."""
BUCKET_BYTES = 8 << 20
_EPS = 1e-6
"""That of `torch.nn.utils.clip_grad_norm_`."""
_COMPARED_BYTES = 8 << 20
"""Gradients that are compared by value in an update; the others have their turn in the next ones."""


@dataclass(slots=True)
class _Sent:
    """A gradient that was copied into a bucket."""

    gradient: Tensor
    version: int
    value: Tensor | None = None
    """A copy, if values are compared."""

    def is_still(self, gradient: Tensor | None) -> bool:
        return gradient is self.gradient and gradient._version == self.version


@dataclass(slots=True)
class _Bucket:
    parameters: list[Tensor]
    flat: Tensor
    views: list[Tensor]
    sent: list[_Sent | None]
    num_missing: int
    work: Reduction | RoundedAllReduce | None = None

    def put(self, index: int, *, is_compared: bool = False) -> None:
        gradient = self.parameters[index].grad
        if gradient is None:
            self.views[index].zero_()
            self.sent[index] = None
            return
        self.views[index].copy_(gradient.detach() if gradient.requires_grad else gradient)
        self.sent[index] = _Sent(gradient, gradient._version, gradient.detach().clone() if is_compared else None)


class GradientBuckets:
    """The buckets of some parameters. All methods but `take` and `note` are called by all ranks alike."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        ranks: RankGrid | None = None,
        rounded: RoundedSums | None = None,
    ) -> None:
        """`parameters`: in the order of the optimizer. Backward passes are ready with the last ones first. `rounded`:
        adds up the fp32 gradients, over one axis; None: gradients are added up in their own type."""
        self.parameters = list(parameters)
        self.ranks = ranks
        """Those whose gradients are added up. Must be set before anything is sent."""
        self._rounded = rounded
        self._buckets = [_bucket(some) for some in _divided(self.parameters[::-1])]
        self._place = {id(p): (b, i) for b in self._buckets for i, p in enumerate(b.parameters)}
        self._num_launched = 0
        self._noted: list[tuple[_Sent | None, Tensor | None]] = []
        self.num_idle = [0] * len(self.parameters)
        """For each parameter: updates in a row in which no rank has used it."""
        self._num_compared = 0
        self._compared: frozenset[int] = self._next_compared()
        """Ids of the parameters whose gradients are compared by value, if they are sent early."""

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._place

    def take(self, parameter: Tensor) -> int:
        """The gradient of a parameter is ready: sends what is full. Returns how many buckets that are."""
        bucket, index = self._place[id(parameter)]
        before = self._num_launched
        if bucket.work is not None:
            return 0  # it has changed since it was sent: `is_stale` finds it
        if bucket.sent[index] is None:
            bucket.num_missing -= 1
        bucket.put(index, is_compared=id(parameter) in self._compared)
        while self._num_launched < len(self._buckets) and not self._buckets[self._num_launched].num_missing:
            self._launch()
        return self._num_launched - before

    def send(self) -> None:
        """Send all that was not sent yet."""
        while self._num_launched < len(self._buckets):
            bucket = self._buckets[self._num_launched]
            for index, parameter in enumerate(bucket.parameters):
                sent = bucket.sent[index]
                if sent is None or not sent.is_still(parameter.grad):
                    bucket.put(index)
            self._launch()

    @property
    def is_stale(self) -> bool:
        """True if a gradient is another one than was sent."""
        return any(
            parameter.grad is not None if sent is None else not sent.is_still(parameter.grad)
            for bucket in self._buckets
            for parameter, sent in zip(bucket.parameters, bucket.sent, strict=True)
        )

    def is_rewritten(self) -> Tensor:
        """A bool scalar on the device: a gradient that was compared has changed without torch's knowledge."""
        sent = (sent for bucket in self._buckets for sent in bucket.sent if sent is not None)
        pairs = [(one.gradient, one.value) for one in sent if one.value is not None]
        if all(now.is_cpu for now, _ in pairs):  # without temporary tensors
            return torch.tensor(not all(torch.equal(now, value) for now, value in pairs))
        return torch.stack([(now != value).any() for now, value in pairs]).any()

    @property
    def are_all_compared(self) -> bool:
        return len(self._compared) == len(self.parameters)

    def wait_for_sums(self) -> None:
        works = [bucket.work for bucket in self._buckets if bucket.work is not None]
        for work in works:
            if isinstance(work, RoundedAllReduce):
                work.gather()
        for work in works:
            work.wait()

    def begin(self) -> None:
        """Forget what was sent."""
        self._num_launched = 0
        self._noted = []
        if not self.are_all_compared:
            self._compared = self._next_compared()
        for bucket in self._buckets:
            bucket.work, bucket.sent, bucket.num_missing = None, [None] * len(bucket.sent), len(bucket.sent)

    def divide(self, weight: float) -> None:
        for bucket in self._buckets if weight != 1.0 else ():
            bucket.flat.div_(weight)

    def give(self, weight: float) -> None:
        """Every rank has the sums, and all parameters were used: `grad` has the mean, and what was sent is
        forgotten."""
        self.divide(weight)
        self.begin()
        self.num_idle = [0] * len(self.parameters)
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def sums(self) -> list[Tensor]:
        """Return the sums of all parameters, once they were waited for."""
        return [view for bucket in self._buckets for view in bucket.views]

    def sum_of(self, parameter: Tensor) -> Tensor:
        bucket, index = self._place[id(parameter)]
        return bucket.views[index]

    def note(self) -> None:
        """Note the gradients as they are, with their values."""
        self._noted = []
        for gradient in (parameter.grad for parameter in self.parameters):
            sent = None if gradient is None else _Sent(gradient, gradient._version)
            self._noted.append((sent, None if gradient is None else gradient.detach().clone()))

    @property
    def is_as_noted(self) -> bool:
        return len(self._noted) == len(self.parameters) and all(
            parameter.grad is None
            if sent is None or value is None
            else sent.is_still(parameter.grad) and torch.equal(sent.gradient, value)
            for parameter, (sent, value) in zip(self.parameters, self._noted, strict=True)
        )

    def _next_compared(self) -> frozenset[int]:
        chosen: set[int] = set()
        num_bytes = 0
        for number in range(self._num_compared, self._num_compared + len(self.parameters)):
            parameter = self.parameters[number % len(self.parameters)]
            num_bytes += parameter.nbytes
            if chosen and num_bytes > _COMPARED_BYTES:
                break
            chosen.add(id(parameter))
        self._num_compared += len(chosen)
        return frozenset(chosen)

    def _launch(self) -> None:
        assert self.ranks is not None
        bucket = self._buckets[self._num_launched]
        self._num_launched += 1
        if self._rounded is not None and bucket.flat.dtype is torch.float32:
            (group,) = self.ranks.axis_groups
            assert group is not None
            bucket.work = RoundedAllReduce(self._rounded, bucket.flat, group)
        else:
            bucket.work = self.ranks.begin_all_reduce(bucket.flat)


@torch.no_grad()
def sum_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, of complex ones of their absolute values: a float64 scalar on the
    device. Not in half precision: each norm would be rounded to 8 or 11 bits, and the factor of all gradients would
    depend on how they are divided."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (dtype, _), same_kind in by_kind.items():
        norms = torch._foreach_norm(same_kind, 2, dtype=torch.promote_types(dtype, torch.float32))
        total += torch.stack(norms).double().square().sum().to(device)
    return total


def clip_factor(total_norm: float, max_norm: float | None) -> float:
    """Return what all gradients are multiplied by: below 1 if `total_norm` is above `max_norm`, of which None means
    any."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (total_norm + _EPS))


def _divided(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters of one type and device in runs of about the size of a bucket, in the order of their last ones."""
    done: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        key = parameter.dtype, parameter.device
        some, num_bytes = filling.pop(key, ([], 0))
        some.append(parameter)
        num_bytes += parameter.numel() * parameter.element_size()
        if num_bytes >= (BUCKET_BYTES if done else FIRST_BUCKET_BYTES):
            done.append(some)
        else:
            filling[key] = some, num_bytes
    return done + [some for some, _ in filling.values()]


def _bucket(parameters: list[Tensor]) -> _Bucket:
    first, num = parameters[0], len(parameters)
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    parts = torch.split(flat, [p.numel() for p in parameters])
    views = [_like(part, p) for part, p in zip(parts, parameters, strict=True)]
    return _Bucket(parameters, flat, views, [None] * num, num)


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """A view of `part` with the shape of the parameter, and with its strides if that is dense, as autograd makes
    gradients."""
    if parameter.is_contiguous() or overlaps_itself(parameter):
        return part.view(parameter.shape)
    is_dense = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)) + 1 == part.numel()
    if not is_dense:
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
