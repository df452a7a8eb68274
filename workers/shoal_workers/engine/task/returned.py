"""What a task's `loss` has returned, from one call to a mean over all ranks: the loss, and metrics of the task's own.

    one call       a loss, or (loss, {"accuracy": 0.5}); everything else is refused, with the place of `loss` in the
                   task's file, what it returned, and what to return instead
    micro-batch    both get the weight of the micro-batch and the rank's share
    first pass     the ranks agree on the names; a stage of a pipeline that computes no loss learns them
    every pass     the shares of all ranks add up to the mean, as those of the loss do

Hidden here: what is accepted as a number, and that the names must be the same in every micro-batch, on every rank:
otherwise a mean would be over a part of the samples. The caller adds the shares up: in the vote, or exactly in
deterministic mode. Called by `LoadedTask.evaluate`, within `UserCode`, so that the error is the task's; by
`GradientPass` and by `Validation`.
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
from shoal_workers.engine.group.agreement import agree

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of one call of a task's `loss`."""

    loss: Tensor
    """One element; the graph is attached."""
    metrics: Mapping[str, Tensor]
    """Scalars of a floating-point type on the loss's device, without a graph; by name, ascending."""


def read_returned(value: Any, function: Callable[..., Any]) -> Returned:
    """Read what `function`, the task's `loss`, has returned.

    Raises:
        TypeError, ValueError: it is neither a scalar tensor nor such a tensor with metrics.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return Returned(value, {})
    where = f"loss() ({place_of(function)})"
    if not isinstance(value, tuple):
        raise TypeError(f"{where} must return a scalar tensor, the mean over the micro-batch; it returned {_a(value)}.")
    if len(value) != 2 or not isinstance(value[1], Mapping):
        parts = " and ".join(_a(part) for part in value[:4])
        raise TypeError(
            f"{where} returned a tuple of {len(value)} values: {parts}. "
            'Return a scalar tensor, or (loss, {"accuracy": value}) to report metrics beside it.'
        )
    loss, metrics = value
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            f"{where} must return a scalar tensor, the mean over the micro-batch, before its metrics; "
            f"it returned {_a(loss)}."
        )
    _refuse_names(metrics, where)
    return Returned(loss, {name: _scalar(name, metrics[name], loss, where) for name in sorted(metrics)})


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


def _scalar(name: str, value: Any, loss: Tensor, where: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        own = value.detach()
        own = own.full_tensor() if isinstance(own, DTensor) else own
        if own.dtype in _HALF:
            own = own.float()
        elif not own.is_floating_point():
            own = own.double()
        return own.reshape(()).to(loss.device)
    if isinstance(value, Real):
        return torch.full((), float(value), dtype=torch.float64, device=loss.device)
    shown = _a(value) if value is None or isinstance(value, Tensor) else f"{_a(value)}, {reprlib.repr(value)}"
    way_out = "Take its mean()." if isinstance(value, Tensor) else "Return a number or a tensor with one element."
    raise TypeError(
        f"{where} returned the metric {name!r} as {shown}. A value is one number: the mean over the samples of the "
        f"micro-batch. {way_out}"
    )


def _a(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + (" of complex numbers" if value.is_complex() else "")
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class Share:
    """Returns this rank's share of the mean loss and the mean metrics of a micro-batch. Scalars."""

    loss: Tensor
    metrics: Mapping[str, Tensor] | None
    """None if another rank of the pipeline computes them."""


class Metrics:
    """Metrics of the training, or of the validation, of one generation on one rank. Training thread only.

    Args:
        function: the task's `loss`, for messages.
        writes_log: this rank says in the job's log what holds for all ranks.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device, *, writes_log: bool) -> None:
        self._function = function
        self._writes_log = writes_log
        self._device = device
        self._names: tuple[str, ...] | None = None
        self._not_finite: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names in ascending order. Called after `agree`."""
        assert self._names is not None, "agree comes first"
        return self._names

    def agree(self, shares: Sequence[Share]) -> None:
        """Called after each pass, before its shares are added up. It is a collective the first time, on all ranks.

        Raises:
            ValueError: the names differ between micro-batches, ranks or steps.
        """
        own = next((tuple(share.metrics) for share in shares if share.metrics is not None), None)
        if self._names is None:
            found = agree(
                None if own is None else _SEPARATOR.join(own),
                max_bytes=MAX_METRICS * (MAX_NAME_CHARS + 1),
                device=self._device,
            )
            self._names = tuple(found.text.split(_SEPARATOR)) if found.text else ()
            if own is not None and own != self._names:
                self._refuse(own, f"and on rank {found.rank}")
        for share in shares:
            if share.metrics is not None and tuple(share.metrics) != self._names:
                self._refuse(tuple(share.metrics), "and for the micro-batches before")

    def columns(self, shares: Sequence[Share]) -> list[Tensor]:
        """Returns for each name the values of `shares`, of shape (n,) with any n."""
        present = [share.metrics for share in shares if share.metrics is not None]
        if not present:
            return [torch.zeros(0, device=self._device)] * len(self.names)
        return [torch.stack([metrics[name] for metrics in present]) for name in self.names]

    def sums(self, shares: Sequence[Share]) -> Tensor:
        """Returns this rank's share of each metric, float64 of shape (len(names),). Added up as the losses are."""
        if not self.names:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        return torch.stack([column.sum().double() for column in self.columns(shares)])

    def by_name(self, values: Sequence[float]) -> dict[str, float]:
        """The sums over all ranks. One that is not finite is left out; the first time this is said in the log."""
        for name, value in zip(self.names, values, strict=True):
            if self._writes_log and not math.isfinite(value) and name not in self._not_finite:
                self._not_finite.add(name)
                sys.stderr.write(
                    f"loss() ({place_of(self._function)}): the metric {name!r} is {value} and is left out where it is "
                    "not finite\n"
                )
        return {name: value for name, value in zip(self.names, values, strict=True) if math.isfinite(value)}

    def _refuse(self, names: tuple[str, ...], elsewhere: str) -> None:
        raise ValueError(
            f"loss() ({place_of(self._function)}) returned {_words(names)} for this micro-batch, {elsewhere} "
            f"{_words(self.names)}. It must return the same metrics for every micro-batch, on every rank and in every "
            "step: their values are means over all samples. Return nan where a metric has no value."
        )


def _words(names: Sequence[str]) -> str:
    return f"the metrics {', '.join(names)}" if names else "no metrics"
