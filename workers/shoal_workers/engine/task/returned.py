"""What a task's `loss` has returned: a loss, or `(loss, {"accuracy": value, ...})`. Refuses everything else.

A refusal names the place of `loss` in the task's file, what it returned, and what to return instead. Called by
`LoadedTask.evaluate`, within `UserCode`, so that the error is the task's.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal_workers.contract.checks.metric_names import MAX_METRICS, MAX_NAME_CHARS, is_metric_name, suggested_name

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
