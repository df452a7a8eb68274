"""BatchNorm over the whole global batch (`batch.sync: global`), as torch's SyncBatchNorm over all samples of a step.

    forward     each call of a layer sums count, mean and mean square of its input over all ranks, and normalises with
                the mean and the variance of the global batch
    backward    the same with the two sums of gradients that the gradient of a mean and of a variance has
    a pass      begins and ends together on all ranks; each exchange carries the number of the layer, so ranks that call
                other layers are refused in words instead of adding up what does not belong together

A rank's micro-batches are one pass then: with one after the other, the statistics of the last would come too late for
the first. So a step is one exchange per layer and direction, and its result is that of one process that holds the whole
batch, at every number of workers and for every `batch.micro_size`. The price is the memory of a rank's share of the
batch. Random numbers in the forward pass would depend on the division, and are refused by the caller.

`synchronise` gives the model's layers another forward when it is built; names, parameters and buffers stay. Running
statistics follow the step's (buffers.py), which all ranks compute alike. Used by `LoadedTask` and `LocalPasses`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.lazy import LazyModuleMixin

from shoal_workers.contract.batch_partition import MicroBatch
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.parallel.device_copies import to_device
from shoal_workers.torch_internals import BatchNorm

_END = 0
"""In place of a layer's number: this rank has ended its pass."""


class Exchange:
    """The sums of one training pass over all ranks.

    Args:
        model: its layers have the same numbers on every rank.
        micro_batch: what this rank contributes; padding contributes nothing.
    """

    def __init__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> None:
        layers = [module for module in model.modules() if isinstance(module, GlobalBatchNorm)]
        self._numbers = {id(layer): number + 1 for number, layer in enumerate(layers)}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._by_number = {number: self._names[key] for key, number in self._numbers.items()}
        self._size = max((layer.num_features for layer in layers), default=0)
        self._device = device
        self._calls: dict[int, int] = defaultdict(int)
        self.is_padding = not micro_batch.weight
        self.counts_calls = bool(micro_batch.weight) and micro_batch.index == 0
        """Calls of a layer count once in `num_batches_tracked`, and not once for each rank."""

    def number(self, layer: nn.Module) -> int:
        return self._numbers[id(layer)]

    def call(self, layer: nn.Module) -> int:
        """Counts a call of a layer. Returns how many there were before in this pass."""
        earlier = self._calls[id(layer)]
        self._calls[id(layer)] += 1
        return earlier

    def sums(self, number: int, count: float, *parts: Tensor) -> tuple[float, list[Tensor]]:
        """The sums of `count` and of the vectors `parts` over all ranks, in double precision. A collective.

        Raises:
            ValueError: other ranks are at another layer.
        """
        # always of the same length, so that ranks at different layers meet as well
        flat = torch.zeros(3 + 2 * self._size, dtype=torch.float64, device=self._device)
        flat[:3] = to_device(torch.tensor([1.0, number, number**2], dtype=torch.float64), self._device)
        if not self.is_padding and parts:
            flat[3 : 3 + sum(len(part) for part in parts)] = torch.cat([part.double() for part in parts])
        box = torch.cat([flat, flat.new_tensor([0.0 if self.is_padding else count])])
        all_ranks().all_reduce_small(box)
        ranks, numbers, squares, total_count = torch.cat([box[:3], box[-1:]]).tolist()  # one wait for the device
        if ranks * squares != numbers**2:
            here = f"is at the layer {self._by_number[abs(number)]!r}" if number else "has ended its pass"
            raise ValueError(
                f"batch.sync is global, and the ranks do not call the same BatchNorm layers: this one {here}, and "
                "others are elsewhere. The model runs other blocks for other samples, and there is no mean of what "
                "only some of them compute. Set batch.sync to micro_batch."
            )
        summed, at = [], 3
        for part in parts:
            summed.append(box[at : at + len(part)])
            at += len(part)
        return total_count, summed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surrounds the forward and backward pass of one step on this rank."""
        GlobalBatchNorm.exchange = self
        try:
            yield
        finally:
            GlobalBatchNorm.exchange = None

    def end(self) -> None:
        """Called after the forward pass, and again after the backward pass: all ranks have called the same layers."""
        self.sums(_END, 0.0)


class GlobalBatchNorm(BatchNorm):
    """A BatchNorm that in a training pass normalises over the global batch; else as torch's own."""

    exchange: ClassVar[Exchange | None] = None
    """That of the pass which runs now in this process; None if none does, or it is no training."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        exchange = GlobalBatchNorm.exchange
        if exchange is None or not self.training:
            return self._alone(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        y, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, exchange, exchange.number(self)
        )
        if self.track_running_stats and self.running_mean is not None:
            self._track(exchange, mean, variance, float(count))
        return y  # type: ignore[no-any-return]

    def _alone(self, x: Tensor) -> Tensor:
        """As torch's own, which takes no half-precision weight beside running statistics in fp32."""
        if self.weight is None or self.running_mean is None or self.weight.dtype is self.running_mean.dtype:
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        wide, bias = self.running_mean.dtype, None if self.bias is None else self.bias.to(self.running_mean.dtype)
        momentum = self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        statistics, weight = (self.running_mean, self.running_var), self.weight.to(wide)
        y = functional.batch_norm(x.to(wide), *statistics, weight, bias, self.training, momentum or 0.0, self.eps)
        return y.to(x.dtype)

    @torch.no_grad()
    def _track(self, exchange: Exchange, mean: Tensor, variance: Tensor, count: float) -> None:
        assert self.running_mean is not None and self.running_var is not None
        factor = self.momentum
        if self.num_batches_tracked is not None:
            earlier = exchange.call(self)
            if exchange.counts_calls:
                self.num_batches_tracked.add_(1)
                earlier = -1  # counted in the buffer
            if factor is None:
                factor = 1.0 / (int(self.num_batches_tracked) + earlier + 1)
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor or 0.0)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor or 0.0)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the statistics of all ranks; x: (n, channels, ...)"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, exchange: Exchange, number: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [0, *range(2, x.ndim)]
        own_variance, own_mean = torch.var_mean(wide, dims, correction=0)
        own = float(wide.numel() // wide.shape[1])
        own_mean = own_mean.double()
        count, (total, squares) = exchange.sums(
            number, own, own * own_mean, own * (own_variance.double() + own_mean.square())
        )
        exact_mean = total / count
        variance = (squares / count - exact_mean.square()).clamp_min_(0.0)
        mean, scale = exact_mean.to(wide.dtype), (variance + eps).rsqrt().to(wide.dtype)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.exchange, ctx.number, ctx.count, ctx.dims = exchange, number, count, dims
        factor = scale if weight is None else scale * weight.to(wide.dtype)
        y = (wide - _along(mean, wide)) * _along(factor, wide)
        if bias is not None:
            y += _along(bias.to(wide.dtype), wide)
        counted = torch.tensor(count, dtype=torch.float64)
        ctx.mark_non_differentiable(exact_mean, variance, counted)
        return y.to(x.dtype), exact_mean, variance, counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        wide, along = x.to(mean.dtype), gradient.to(mean.dtype)
        normal = (wide - _along(mean, wide)) * _along(scale, wide)
        of_bias, of_weight = along.sum(ctx.dims), (along * normal).sum(ctx.dims)
        _, (sum_gradient, sum_product) = ctx.exchange.sums(-ctx.number, 0.0, of_bias, of_weight)
        if ctx.exchange.is_padding:  # it has no part in the statistics
            of_x = torch.zeros_like(x)
        else:
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            centred = (
                along
                - _along((sum_gradient / ctx.count).to(wide.dtype), wide)
                - normal * _along((sum_product / ctx.count).to(wide.dtype), wide)
            )
            of_x = (centred * _along(factor, wide)).to(x.dtype)
        if weight is None:
            return of_x, None, None, None, None, None
        return of_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None


def _along(vector: Tensor, like: Tensor) -> Tensor:
    """A vector over the channels of `like`."""
    return vector.view(1, -1, *(1 for _ in range(like.ndim - 2)))


def synchronise(model: nn.Module, line: str) -> nn.Module:
    """Gives every BatchNorm of the model the forward of `GlobalBatchNorm`, in place. `line`: of build_model.

    Raises:
        TypeError: one has a forward of its own, or there is none.
    """
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    if not norms:
        raise TypeError(
            f"{line}: batch.sync is global, and the model has no BatchNorm, which is what it is about. Remove "
            "batch.sync: it costs memory."
        )
    for module in norms:
        kind = type(module)
        if issubclass(kind, GlobalBatchNorm | LazyModuleMixin):
            continue
        if kind.forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise TypeError(
                f"{line}: batch.sync is global, and {kind.__name__} is a BatchNorm with a forward() of its own, of "
                "which the statistics are not known. Use torch's BatchNorm, or set batch.sync to micro_batch."
            )
        setattr(module, "__class__", type(kind.__name__, (GlobalBatchNorm, kind), {"__module__": kind.__module__}))  # noqa: B010
    return model
