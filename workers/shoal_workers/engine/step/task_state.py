"""What `state_dict` of a task returns, as buffers of the model: they follow the rule of buffers (buffers.py), so the
task has the same values on all ranks, and they are in snapshots and checkpoints.

    before a micro-batch    the task gets the values that the step began with
    after its loss          what the task has then is what the forward pass has changed

Numbers are buffers without dimensions. Texts and None stay as they are. Attached by `build_runtime`, used by
`StepBuffers` around each forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        for name, value in self._leaves(self._tree):
            self.register_buffer(name, value.detach().clone() if isinstance(value, Tensor) else _tensor(value))

    def forward(self, value: Any) -> Any:
        """An nn.Sequential calls it as its last module."""
        return value

    def load(self) -> None:
        """Give the task the values of the buffers."""
        self._task.load_state_dict(self._filled(self._tree, ""))

    @torch.no_grad()
    def store(self) -> None:
        """Take the values of the task into the buffers."""
        self._tree = self._task.state_dict()
        names = set()
        for name, value in self._leaves(self._tree):
            buffer = self._buffers.get(name)
            if buffer is None or (isinstance(value, Tensor) and value.shape != buffer.shape):
                raise ValueError(
                    f"state_dict() of the task returns {name.replace('__', '.')!r} with another shape than before the "
                    "first step, or did not return it then. Give it its final shape in __init__."
                )
            names.add(name)
            buffer.copy_(value if isinstance(value, Tensor) else _tensor(value))
        if names != self._buffers.keys():
            raise ValueError("state_dict() of the task returns less than before the first step. Return the same names.")

    def _leaves(self, value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            name = f"{path}__{key}".replace(".", "_").removeprefix("__")
            if isinstance(item, (dict, list, tuple)):
                yield from self._leaves(item, name)
            elif isinstance(item, Tensor) or type(item) in _DTYPES:
                yield name, item
            elif not isinstance(item, (str, type(None))):
                raise ValueError(
                    f"state_dict() of the task returns {type(item).__name__} as {name.replace('__', '.')!r}. It may "
                    "return tensors, numbers, texts, lists and dicts."
                )

    def _filled(self, value: Any, path: str) -> Any:
        """The tree with the values of the buffers."""
        if isinstance(value, dict):
            return {key: self._filled(item, f"{path}__{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._filled(item, f"{path}__{index}") for index, item in enumerate(value))
        buffer = self._buffers.get(path.replace(".", "_").removeprefix("__"))
        if buffer is None:
            return value
        return buffer.detach().clone().to(value.device) if isinstance(value, Tensor) else type(value)(buffer.item())


def _tensor(value: Any) -> Tensor:
    return torch.tensor(value, dtype=_DTYPES[type(value)])
