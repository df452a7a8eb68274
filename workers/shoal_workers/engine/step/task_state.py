"""What `state_dict` of a task returns, as buffers of the model: they follow the rule of buffers (buffers.py), so the
task has the same values on all ranks, and they are in snapshots and checkpoints.

    before a micro-batch    the task gets the values that the step began with
    after its loss          what the task has then is what the forward pass has changed

Numbers are buffers without dimensions. Texts and None stay as they are. Attached by `build_runtime`, used by
`StepBuffers` around each forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model import TASK_STATE

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def has_declared_state(task: object) -> bool:
    """Return whether the task has `state_dict` and `load_state_dict` of its own."""
    methods = (getattr(task, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(task, nn.Module) and all(map(callable, methods))


def attach_task_state(task: Any, model: nn.Module, layout: Layout) -> None:
    """Called before the model is split. Without declared state it does nothing.

    Raises:
        ValueError: the state cannot be kept.
    """
    if not has_declared_state(task):
        return
    if layout.pp > 1:
        raise ValueError(
            "the task has state_dict(), and in a pipeline only the ranks of the last stage compute its loss. Set "
            "parallelism.pp to 1, or keep the state in buffers of the model."
        )
    model.add_module(TASK_STATE, TaskState(task))


class TaskState(nn.Module):
    def __init__(self, task: Any) -> None:
        super().__init__()
        self._task = task
        self._tree = task.state_dict()
        _map(self._tree, lambda name, value: self.register_buffer(name, _to_tensor(value).detach().clone()))

    def forward(self, value: Any) -> Any:
        """An nn.Sequential calls it as its last module."""
        return value

    def load(self) -> None:
        """Give the task the values of the buffers."""
        self._task.load_state_dict(_map(self._tree, self._read))

    @torch.no_grad()
    def store(self) -> None:
        """Take the values of the task into the buffers."""
        self._tree = self._task.state_dict()
        names = set()

        def write(name: str, value: Any) -> None:
            buffer = self._buffers.get(name)
            if buffer is None or (isinstance(value, Tensor) and value.shape != buffer.shape):
                raise ValueError(
                    f"state_dict() of the task returns {name.replace('__', '.')!r} with another shape than before the "
                    "first step, or did not return it then. Give it its final shape in __init__."
                )
            names.add(name)
            buffer.copy_(_to_tensor(value))

        _map(self._tree, write)
        if names != self._buffers.keys():
            raise ValueError("state_dict() of the task returns less than before the first step. Return the same names.")

    def _read(self, name: str, value: Any) -> Any:
        buffer = self._buffers.get(name)
        if buffer is None:
            return value
        return buffer.detach().clone().to(value.device) if isinstance(value, Tensor) else type(value)(buffer.item())


def _map(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a state with `change(name, value)` in the place of each tensor and number."""
    if isinstance(value, dict):
        return {key: _map(item, change, f"{path}__{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, change, f"{path}__{index}") for index, item in enumerate(value))
    name = path.replace(".", "_").removeprefix("__")
    if isinstance(value, Tensor) or type(value) in _DTYPES:
        return change(name, value)
    if not isinstance(value, (str, type(None))):
        raise ValueError(
            f"state_dict() of the task returns {type(value).__name__} as {name.replace('__', '.')!r}. It may return "
            "tensors, numbers, texts, lists and dicts."
        )
    return value


def _to_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=_DTYPES[type(value)])
