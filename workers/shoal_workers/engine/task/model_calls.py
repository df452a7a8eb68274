"""Splits a task's `loss(model, batch)` into the arguments of the model and the loss of its output.

A pipeline's first stage needs the inputs, its last stage the loss; the task knows nothing of stages. Its `loss` calls
the model exactly once, so a replacement for the model can record the arguments, or return an output that came from the
last stage. Called by `PipelinePasses`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoal_workers.engine.task.returned import Returned

LossOf = Callable[[nn.Module, Any], Returned]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """How a task calls its model for one batch."""

    first: Tensor
    """The argument that flows through the stages: each later stage gets the previous stage's output in its place."""
    others: dict[str, Any]
    """The other arguments by name; every stage gets them."""


class ModelCalls:
    """How one task calls one model. The model's signature is read before the model is split."""

    def __init__(self, loss: LossOf, model: nn.Module) -> None:
        self._loss = loss
        self._signature = inspect.signature(type(model).forward)

    def catch(self, batch: Any) -> ModelCall:
        """The arguments that the task calls its model with. Raises whatever the task raises before that call."""
        try:
            self._loss(_ArgumentRecorder(), batch)
        except _Caught as caught:
            bound = self._signature.bind(None, *caught.args, **caught.kwargs).arguments
            (_, first), *others = list(bound.items())[1:]
            return ModelCall(first, dict(others))
        raise TypeError(
            "loss() did not call the model that it was given. A pipeline needs this call to know its inputs."
        )

    def loss_of(self, output: Tensor, batch: Any) -> Returned:
        """The task's loss and metrics of the last stage's output."""
        return self._loss(_FixedOutput(output), batch)


class _Caught(BaseException):
    """Not an Exception, because a task may catch those."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


class _ArgumentRecorder(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Caught(args, kwargs)


class _FixedOutput(nn.Module):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self._output
