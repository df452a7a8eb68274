"""What a trainer's callbacks keep in attributes, as a state that `run.track` takes.

A callback of the user's seldom has `state_dict`: its counters, best values and lists are attributes. Those that have
changed since training began are its state. The module also counts the samples of a batch. Called by `shoal.hf` and
`shoal.lightning`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None), torch.Tensor)


class Attributes:
    """The attributes of these objects that change. Those of modules whose names begin with `_` are the libraries'.

    Args:
        objects: each by a name that is the same in every group.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects = objects
        self._first = {name: _attributes(tracked) for name, tracked in objects.items()}

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that differ from those at first.

        Raises:
            TypeError: one of them cannot be kept.
        """
        state: dict[str, dict[str, Any]] = {}
        for name, tracked in self._objects.items():
            first = self._first[name]
            changed = {key: value for key, value in _attributes(tracked).items() if not _is_same(value, first.get(key))}
            for key, value in changed.items():
                if not _is_plain(value):
                    raise TypeError(
                        f"{type(tracked).__name__}.{key} changes while it trains and is {type(value).__name__}, which "
                        "cannot be kept when the group changes. Make it of numbers, texts, tensors, lists and dicts."
                    )
            state[name] = changed
        return state

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for name, changed in state.items():
            for key, value in changed.items():
                setattr(self._objects[name], key, value)


def as_numbers(value: Any) -> Any:
    """Return the same with Python's numbers in the place of numpy's."""
    if isinstance(value, Mapping):
        return {key: as_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(as_numbers, value))
    return value.item() if type(value).__module__ == "numpy" and value.ndim == 0 else value


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor of a micro-batch that has dims; 1 if there is none."""
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, (list, tuple)) else [batch]
    return next((len(value) for value in values if getattr(value, "ndim", 0)), 1)


def _attributes(attributes: object) -> dict[str, Any]:
    """Return copies of the attributes that may be state. Modules, loggers, files and other objects are not."""
    values = getattr(attributes, "__dict__", {})
    is_module = isinstance(attributes, torch.nn.Module)
    return {
        key: copy.deepcopy(value)
        for key, value in values.items()
        if (_is_plain(value) or isinstance(value, (set, frozenset, deque)))
        and not (is_module and (key.startswith("_") or key == "training"))
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, _PLAIN[:-1]) and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and value.shape == other.shape and torch.equal(value, other)
    if isinstance(value, Mapping):
        is_alike = isinstance(other, Mapping) and value.keys() == other.keys()
        return is_alike and all(_is_same(item, other[key]) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        is_alike = type(value) is type(other) and len(value) == len(other)
        return is_alike and all(map(_is_same, value, other))
    return type(value) is type(other) and bool(value == other)
