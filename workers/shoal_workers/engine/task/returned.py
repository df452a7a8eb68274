"""What a task's `loss` has returned, from one call to a mean over all ranks: the loss, and metrics of the task's own.

    one call       a mean, or (sum, weight); each also with {"accuracy": 0.5}. Everything else is refused, with the
                   place of `loss` in the task's file, what it returned, and what to return instead
    micro-batch    all get the share of the micro-batch and of the rank; metrics also the weight, if there is one
    first pass     the ranks agree on the form and the names; a stage of a pipeline that computes no loss learns them
    every pass     the shares of all ranks add up to the mean; with weights, to a sum that is divided by that of the
                   weights

Hidden here: what is accepted as a number, that form and names must be the same in every micro-batch, on every rank
(otherwise a mean would be over a part of the samples), and that the weights travel as the first of the metrics' sums.
The caller adds the shares up: in the vote, or exactly in deterministic mode. Called by `LoadedTask.evaluate`, within
`UserCode`, so that the error is the task's; by `GradientPass` and by `Validation`.
"""

from __future__ import annotations

import inspect
import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal_workers.contract.worker_reports import MAX_METRICS, MAX_NAME_CHARS, is_metric_name, suggested_name
from shoal_workers.engine.group.all_ranks import all_ranks

_HALF = (torch.float16, torch.bfloat16)
_COUNTS = "Return how much of the micro-batch counts: a finite number of 0 or more, such as mask.sum()."


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of one call of a task's `loss`."""

    loss: Tensor
    """One element; the graph is attached."""
    metrics: Mapping[str, Tensor]
    """Scalars of a floating-point type on the loss's device, without a graph; by name, ascending."""
    weight: Tensor | None = None
    """Float64 scalar on the loss's device: how much the micro-batch counts, and `loss` is a sum. On a GPU, nan in place
    of a weight that is not allowed: `Metrics.weight` refuses it. None if `loss` is a mean."""


def read_returned(value: Any, function: Callable[..., Any], name: str = "loss") -> Returned:
    """Read what `function`, the task's member of this name, has returned.

    Raises:
        TypeError, ValueError: it is neither a scalar tensor nor such a tensor with a weight, or metrics, or both.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return Returned(value, {})
    where = f"{name}() ({place_of(function)})"
    if not isinstance(value, tuple):
        raise TypeError(
            f"{where} must return a scalar tensor, the mean over the micro-batch; it returned {describe_kind(value)}."
        )
    loss, *rest = value or (None,)
    metrics: Mapping[Any, Any] = rest.pop() if rest and isinstance(rest[-1], Mapping) else {}
    if len(rest) > 1 or len(value) < 2 or not all(isinstance(item, Tensor | Real) for item in rest):
        parts = " and ".join(describe_kind(part) for part in value[:4])
        raise TypeError(
            f"{where} returned a tuple of {len(value)} values: {parts}. Return a scalar tensor, the mean over the "
            'micro-batch, or (sum, weight); and (loss, {"accuracy": value}) or (sum, weight, {"accuracy": value}) to '
            "report metrics beside it."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what, before = ("the sum", "weight") if rest else ("the mean", "metrics")
        raise TypeError(
            f"{where} must return a scalar tensor, {what} over the micro-batch, before its {before}; "
            f"it returned {describe_kind(loss)}."
        )
    _refuse_names(metrics, where)
    scalars = {key: _scalar(key, metrics[key], loss, where) for key in sorted(metrics)}
    return Returned(loss, scalars, *(_weight(item, loss, where) for item in rest))


def place_of(function: Callable[..., Any]) -> str:
    """File and line of a function, for people: `digits.py:38`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else type(function).__name__


def _refuse_names(metrics: Mapping[Any, Any], where: str) -> None:
    for name in metrics:
        if not is_metric_name(name):
            raise ValueError(
                f"{where} returned a metric with the name {reprlib.repr(name)}, which is not allowed. A name has at "
                f"most {MAX_NAME_CHARS} letters, digits and characters of _ . - /, and begins with a letter: for "
                f"example {suggested_name(name)!r}."
            )
    if len(metrics) > MAX_METRICS:
        raise ValueError(
            f"{where} returned {len(metrics)} metrics, and at most {MAX_METRICS} are allowed. Leave some out, for "
            f"example {', '.join(sorted(metrics)[MAX_METRICS:][:3])}."
        )


def _weight(value: Tensor | Real, loss: Tensor, where: str) -> Tensor:
    """Looks at the value only if it is on the host: nothing waits for a GPU."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError(f"{where} returned {describe_kind(value)} as the weight. {_COUNTS}")
        if value.requires_grad:
            raise ValueError(
                f"{where} returned a weight that depends on the model's parameters. No gradient flows through a "
                "weight: detach() it, or compute it from the batch."
            )
        weight = _whole(value).double().reshape(())
    else:
        weight = torch.full((), float(value), dtype=torch.float64)
    if weight.is_cpu and not 0 <= float(weight) < math.inf:
        raise ValueError(f"{where} returned the weight {float(weight):g}. {_COUNTS}")
    return weight.where((weight >= 0) & weight.isfinite(), math.nan).to(loss.device)


def _whole(value: Tensor) -> Tensor:
    detached = value.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _scalar(name: str, value: Any, loss: Tensor, where: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        scalar = _whole(value)
        if scalar.dtype in _HALF:
            scalar = scalar.float()
        elif not scalar.is_floating_point():
            scalar = scalar.double()
        return scalar.reshape(()).to(loss.device)
    if isinstance(value, Real):
        return torch.full((), float(value), dtype=torch.float64, device=loss.device)
    shown = (
        describe_kind(value)
        if value is None or isinstance(value, Tensor)
        else f"{describe_kind(value)}, {reprlib.repr(value)}"
    )
    way_out = "Take its mean()." if isinstance(value, Tensor) else "Return a number or a tensor with one element."
    raise TypeError(
        f"{where} returned the metric {name!r} as {shown}. A value is one number: the mean over the samples of the "
        f"micro-batch. {way_out}"
    )


def describe_kind(value: Any) -> str:
    """Return what a value is, with an article, for messages: "a tensor of shape (2, 3)", "an int", "None"."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + (" of complex numbers" if value.is_complex() else "")
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


_WEIGHTED = "(sum, weight)"


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's share of the loss and the metrics of a micro-batch. Scalars."""

    loss: Tensor
    metrics: Mapping[str, Tensor] | None
    """None if another rank of the pipeline computes them."""
    weight: Tensor | None = None
    """None if `loss` is a mean, or another rank of the pipeline computes it."""

    @property
    def form(self) -> tuple[str, ...] | None:
        """What must be the same in every micro-batch: the form of the loss, and the names of the metrics."""
        if self.metrics is None:
            return None
        return ("" if self.weight is None else _WEIGHTED, *self.metrics)


class Metrics:
    """Weights and metrics of the training, or of the validation, of one generation on one rank. Training thread only.

    Args:
        function: the task's `loss`, for messages.
        writes_log: this rank says in the job's log what holds for all ranks.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device, *, writes_log: bool) -> None:
        self._function = function
        self._writes_log = writes_log
        self._device = device
        self._form: tuple[str, ...] | None = None
        self._not_finite: set[str] = set()

    @property
    def is_weighted(self) -> bool:
        """True if losses are sums, with weights. Called after `agree`."""
        return self._agreed[0] == _WEIGHTED

    @property
    def num_sums(self) -> int:
        """What `sums` has: the weight if there is one, and the metrics. Called after `agree`."""
        return len(self._agreed) - 1 + self.is_weighted

    @property
    def _agreed(self) -> tuple[str, ...]:
        assert self._form is not None, "agree comes first"
        return self._form

    def agree(self, shares: Sequence[Share]) -> None:
        """Called after each pass, before its shares are added up. It is a collective the first time, on all ranks.

        Raises:
            ValueError: forms or names differ between micro-batches, ranks or steps.
        """
        form = next((share.form for share in shares if share.form is not None), None)
        if self._form is None:
            forms = enumerate(all_ranks().gather_values(form))
            rank, self._form = next(((rank, other) for rank, other in forms if other is not None), (0, ("",)))
            if form is not None and form != self._form:
                self._refuse(form, f"and on rank {rank}")
        for share in shares:
            if share.form is not None and share.form != self._form:
                self._refuse(share.form, "and for the micro-batches before")

    def columns(self, shares: Sequence[Share]) -> list[Tensor]:
        """Returns the weights, if there are any, and for each name the values of `shares`, of shape (n,) with any n."""
        present = [share for share in shares if share.metrics is not None]
        if not present:
            return [torch.zeros(0, device=self._device)] * self.num_sums
        weights = [share.weight for share in present if share.weight is not None]
        columns = [torch.stack(weights)] if weights else []
        return columns + [
            torch.stack([share.metrics[name] for share in present if share.metrics is not None])
            for name in self._agreed[1:]
        ]

    def sums(self, shares: Sequence[Share]) -> Tensor:
        """Returns this rank's share of each sum, float64 of shape (num_sums,). Added up as the losses are."""
        if not self.num_sums:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        return torch.stack([column.sum().double() for column in self.columns(shares)])

    def weight(self, sums: Sequence[float], otherwise: float = 1.0) -> float:
        """What the losses' sum over all ranks is divided by; `otherwise` if losses are means. `sums`: over all ranks.

        Raises:
            ValueError: a weight on a GPU was not allowed.
        """
        if not self.is_weighted:
            return otherwise
        if not math.isfinite(sums[0]):
            raise ValueError(
                f"loss() ({place_of(self._function)}) returned a weight that is negative or not finite. {_COUNTS}"
            )
        return sums[0]

    def by_name(self, sums: Sequence[float], weight: float) -> dict[str, float]:
        """The means over all ranks: the sums, divided by `weight`. One that is not finite is left out; the first time
        this is said in the log."""
        names = self._agreed[1:]
        values = [value / weight for value in (sums[1:] if self.is_weighted else sums)]
        for name, value in zip(names, values, strict=True):
            if self._writes_log and not math.isfinite(value) and name not in self._not_finite:
                self._not_finite.add(name)
                sys.stderr.write(
                    f"loss() ({place_of(self._function)}): the metric {name!r} is {value} and is left out where it is "
                    "not finite\n"
                )
        return {name: value for name, value in zip(names, values, strict=True) if math.isfinite(value)}

    def _refuse(self, form: tuple[str, ...], elsewhere: str) -> None:
        if form[0] != self._agreed[0]:
            raise ValueError(
                f"loss() ({place_of(self._function)}) returned {form[0] or 'a mean'} for this micro-batch, {elsewhere} "
                f"{self._agreed[0] or 'a mean'}. It must return the same for every micro-batch, on every rank and in "
                "every step: (sum, weight) unless all micro-batches count alike."
            )
        raise ValueError(
            f"loss() ({place_of(self._function)}) returned {_join_names(form[1:])} for this micro-batch, {elsewhere} "
            f"{_join_names(self._agreed[1:])}. It must return the same metrics for every micro-batch, on every rank "
            "and in every step: their values are means over all samples. Return nan where a metric has no value."
        )


def _join_names(names: Sequence[str]) -> str:
    return f"the metrics {', '.join(names)}" if names else "no metrics"
