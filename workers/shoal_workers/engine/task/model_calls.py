"""Splits a task's `loss(model, batch)` into what goes into the model and what is made of its output.

A pipeline's first stage needs the inputs, its last stage the loss; the task knows neither stages nor pipelines. Its
`loss` calls the model exactly once, so a stand-in can catch the arguments, or answer with an output from elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

LossOf = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """How a task calls its model for one batch."""

    first: Tensor
    """The argument that flows through the stages: later ones get the stage before's output in its place."""
    others: dict[str, Any]
    """By name; every stage gets them."""


class ModelCalls:
    """Of one task and model; the model's signature is read before it is cut."""

    def __init__(self, loss: LossOf, model: nn.Module) -> None:
        self._loss = loss
        self._signature = inspect.signature(type(model).forward)

    def catch(self, batch: Any) -> ModelCall:
        """Raises whatever the task raises before it calls the model."""
        try:
            self._loss(_Catcher(), batch)
        except _Caught as caught:
            bound = self._signature.bind(None, *caught.args, **caught.kwargs).arguments
            (_, first), *others = list(bound.items())[1:]
            return ModelCall(first, dict(others))
        raise TypeError("loss() did not call the model that it was given, so a pipeline does not know its inputs.")

    def loss_of(self, output: Tensor, batch: Any) -> Tensor:
        """What the task makes of the last stage's output."""
        return self._loss(_Answerer(output), batch)


class _Caught(BaseException):
    """Not an Exception: a task may catch those."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


class _Catcher(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Caught(args, kwargs)


class _Answerer(nn.Module):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self._output
