"""Splits a task's `loss(model, batch)` into the arguments of the model and the loss of its output.

    catch      on every rank    loss runs up to its call of the model, which is left with the arguments
    loss_of    on the last      loss runs from its beginning with the same random numbers, the call returns the output
                                that came from the last stage, and loss goes on with the random numbers of that stage

So a task's random numbers before, in and after the call are those of one process. A `loss` calls the model exactly once
and uses nothing else of it: a placeholder for the model refuses the rest. Called by `PipelinePasses`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from shoal_workers.engine.randomness import generator_states, set_generator_states
from shoal_workers.engine.task.returned import Returned
from shoal_workers.torch_internals import tree_leaves

LossOf = Callable[[nn.Module, Any], Returned]
_WAY_OUT = "or use a layout without pp."


@dataclass(frozen=True, slots=True)
class ModelCall:
    """How a task calls its model for one batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: Tensor
    """The first argument of forward."""
    before_loss: Tensor
    """State of the random generators when loss was called."""
    at_call: Tensor
    """State of the random generators when it called the model."""


class ModelCalls:
    """How one task calls one model. The model's signature is read before the model is split."""

    def __init__(self, loss: LossOf, model: nn.Module) -> None:
        self._loss = loss
        self._signature = inspect.signature(type(model).forward)

    def catch(self, batch: Any, *, is_training: bool = True) -> ModelCall:
        """The arguments that the task calls its model with. Raises whatever the task raises before that call.

        Raises:
            TypeError: a pipeline cannot be given these arguments.
        """
        before_loss = generator_states()
        try:
            self._loss(_ArgumentRecorder().train(is_training), batch)
        except _Caught as caught:
            at_call = generator_states()
            return ModelCall(caught.args, caught.kwargs, self._first(caught), before_loss, at_call)
        raise TypeError(
            "loss() did not call the model that it was given. A pipeline needs this call to know its inputs: call "
            f"model(...) once, {_WAY_OUT}"
        )

    def loss_of(
        self, output: Any, batch: Any, call: ModelCall, generators: Tensor, *, is_training: bool = True
    ) -> Returned:
        """The task's loss and metrics of the last stage's output. `generators`: their state at its end."""
        placeholder = _FixedOutput(output, generators)
        set_generator_states(call.before_loss)
        return self._loss(placeholder.train(is_training), batch)

    def _first(self, caught: _Caught) -> Tensor:
        bound = self._signature.bind(None, *caught.args, **caught.kwargs).arguments
        name, first = (*list(bound.items())[1:], ("", None))[0]
        if isinstance(first, tuple) and caught.args:  # forward(self, *inputs)
            first = caught.args[0]
        if not isinstance(first, Tensor) or first.ndim == 0:
            kind = "a tensor without dimensions" if isinstance(first, Tensor) else f"a {type(first).__name__}"
            raise TypeError(
                f"loss() calls the model with {kind} as the first argument{f' {name!r}' if name else ''}. Under a "
                "pipeline it must be a tensor (samples, ...), whose shape tells the stages what they hand over: let "
                f"forward() take that tensor first, {_WAY_OUT}"
            )
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((caught.args, caught.kwargs))):
            raise TypeError(
                "loss() calls the model with an input that requires a gradient. The stages of a pipeline do not return "
                f"gradients of inputs: detach() it, {_WAY_OUT}"
            )
        return first


class _Caught(BaseException):
    """Leaves `loss` at its call of the model. It is no Exception, because a task may catch those."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


_LISTS = frozenset({"parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "modules"})
"""Methods of any module that a placeholder refuses, too."""


class _Placeholder(nn.Module):
    """Replaces a model of which no process has all."""

    def __getattribute__(self, name: str) -> Any:
        if name in _LISTS:
            raise AttributeError(name)  # then Python asks `__getattr__`, which refuses it
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        _refuse(f"{name}()" if name in _LISTS else name)


class _ArgumentRecorder(_Placeholder):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Caught(args, kwargs)


class _FixedOutput(_Placeholder):
    def __init__(self, output: Any, generators: Tensor) -> None:
        super().__init__()
        self.__dict__.update(output=output, generators=generators, was_called=False)

    def forward(self, *_: Any, **__: Any) -> Any:
        if self.__dict__["was_called"]:
            raise TypeError(
                "loss() calls the model more than once. A pipeline goes through the model once for each micro-batch: "
                f"call it with all inputs in one batch (torch.cat) and split the output, {_WAY_OUT}"
            )
        self.__dict__["was_called"] = True
        set_generator_states(self.__dict__["generators"])
        return self.__dict__["output"]


def _refuse(name: str) -> NoReturn:
    raise AttributeError(
        f"loss() uses model.{name}. Under a pipeline no process has the whole model, and loss() can only call it: let "
        f"forward() return what loss() needs, {_WAY_OUT}"
    )
