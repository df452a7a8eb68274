"""What a program may carry from one micro-batch to the next outside of parameters and buffers, as it is at a moment.

    owners      the task, its class, the modules of Python that belong to it, and all modules of its model
    values      numbers, texts, tensors, arrays, random generators; lists, dicts ... of these; modules that are not in
                the model (a teacher in an attribute, or in a list); objects of the task's own classes

What it holds is set back in place, so that other references to a list or a tensor see it, too. What was not there
before is removed, whatever it is. Used by `prove`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal_workers.contract.exception_causes import FrameOwner
from shoal_workers.engine.task.code_owner import TASKS, owner_of
from shoal_workers.engine.task.randomness import is_generator, set_generator, state_of_generator
from shoal_workers.torch_internals import forward_hooks

_MAX_ITEMS = 10_000
"""Longer containers are data."""
_MAX_DEPTH = 5
_FAR = 1_000_000
_MAX_BYTES = 16 << 20
"""Larger tensors are data: only torch's count of their changes is compared."""
_CONTAINERS = (list, tuple, dict, deque, set)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))

Place = tuple[str, str]
"""Name of an owner, and of its attribute."""


def owners_in_task(task: object) -> dict[str, object]:
    """What may carry state beside the model, by what people call it."""
    if has_no_state(task):
        return {}
    modules = {f"the module {name}": module for name, module in list(sys.modules.items()) if _is_of_task(module)}
    return {"the task": task, f"the class {type(task).__name__}": type(task), **modules}


def owners_in_model(parts: Collection[nn.Module]) -> dict[str, object]:
    owners: dict[str, object] = {}
    for name, module in (item for part in parts for item in part.named_modules()):
        if type(module).__module__.startswith("shoal_workers."):
            continue
        owners[name or "the model"] = module
        if hooks := forward_hooks(module):
            named = {f"hook {number}": hook for number, hook in enumerate(hooks)}
            owners[f"{name or 'the model'}, in its hooks"] = SimpleNamespace(**named)
    return owners


def has_no_state(owner: object) -> bool:
    """True if its class is torch's or the engine's: those keep no state in plain attributes."""
    return not hasattr(owner, "__dict__") or all(
        kind.__module__.startswith(("torch.", "shoal_workers.")) for kind in type(owner).__mro__[:-1]
    )


class Attributes:
    """The attributes of some objects, as they are now."""

    def __init__(self, owners: Mapping[str, object]) -> None:
        self._owners = dict(owners)
        self._before = {place: _take(value) for place, value in _values(owners)}

    def changed(self, model: Collection[nn.Module] = ()) -> dict[Place, Content]:
        """The attributes that have another value now, without the model itself."""
        own = {id(module) for part in model for module in part.modules()}
        return {place: _take(value) for place, value in self._changed() if not _has_module_of(value, own)}

    def set_back(self) -> None:
        for place, _ in list(self._changed()):
            before = self._before.get(place)
            _set(self._owners[place[0]], place[1], _Missing if before is None else before.restored(before.value))

    def _changed(self) -> Iterator[tuple[Place, Any]]:
        now = dict(_values(self._owners))
        for place in {**self._before, **now}:
            before = self._before.get(place)
            if before is None or place not in now or not before.is_same(now[place]):
                yield place, now.get(place, _Missing)


def carry(values: Mapping[Place, Content], owners: Mapping[str, object]) -> None:
    """Give these owners what `changed` has returned of others with the same names, which are not used any more."""
    for (owner, key), content in values.items():
        if (target := owners.get(owner)) is not None:
            _set(target, key, content.restored(vars(target).get(key)))


def far_number(content: Content) -> Content | None:
    """Another number, which any condition on it would tell from this one; None if it is no number."""
    value = content.value
    if isinstance(value, bool):
        return Content(not value, None)
    return Content(type(value)(_FAR), None) if type(value) in (int, float) else None


class _Missing:
    """In place of an attribute that is not there."""


@dataclass(frozen=True, slots=True)
class Content:
    """A value and what it contains."""

    value: Any
    inside: Any
    """A copy of the values of a tensor, array or generator; or of each item what it contains. None if only the value's
    identity counts."""

    def is_same(self, now: Any) -> bool:
        value, inside = self.value, self.inside
        if type(now) is not type(value):
            return False
        if isinstance(value, _PLAIN):
            return bool(now == value or (now != now and value != value))  # nan is as it was
        if isinstance(value, Tensor):
            if isinstance(inside, int):
                return now is value and now._version == inside
            is_like = now.shape == inside.shape and now.dtype == inside.dtype and now.device == inside.device
            return is_like and torch.equal(now.detach().nan_to_num(), inside.nan_to_num())
        if inside is None:
            return now is value
        if isinstance(value, np.ndarray):
            return bool(np.array_equal(now, inside))
        if is_generator(value):
            return bool(state_of_generator(now) == inside)
        if type(value) is set:
            return bool(now == inside)
        items = _items(now)
        return items.keys() == inside.keys() and all(one.is_same(items[key]) for key, one in inside.items())

    def restored(self, into: Any) -> Any:
        """What was taken, in the place of `into` if it is of the same kind; else the value itself."""
        inside = self.inside
        target = into if type(into) is type(self.value) else self.value
        if inside is None or isinstance(inside, int):
            return self.value
        if isinstance(self.value, Tensor):
            target = target if target.shape == inside.shape and target.dtype == inside.dtype else self.value
            target.data.copy_(inside)
        elif isinstance(self.value, np.ndarray):
            target = target if target.shape == inside.shape else self.value
            target[...] = inside
        elif is_generator(self.value):
            set_generator(target, inside)
        elif type(self.value) is set:
            target.clear()
            target.update(inside)
        else:
            self._fill(target, inside)
        return target

    def _fill(self, target: Any, inside: Mapping[Any, Content]) -> None:
        now = _items(target)
        items = {key: one.restored(now.get(key, one.value)) for key, one in inside.items()}
        if isinstance(target, dict):
            target.clear()
            target.update(items)
        elif isinstance(target, (list, deque)):
            target.clear()
            target.extend(items.values())
        elif isinstance(target, FunctionType):
            for cell, item in zip(target.__closure__ or (), items.values(), strict=True):
                cell.cell_contents = item
        elif not isinstance(target, (tuple, nn.Module)):
            vars(target).clear()
            vars(target).update(items)


def _take(value: Any, depth: int = 0) -> Content:
    if isinstance(value, Tensor):
        is_kept = value.nbytes <= _MAX_BYTES and value.layout is torch.strided
        return Content(value, value.detach().clone() if is_kept else value._version)
    if isinstance(value, np.ndarray):
        is_kept = value.nbytes <= _MAX_BYTES and value.dtype != object
        return Content(value, value.copy() if is_kept else None)
    if is_generator(value):
        return Content(value, state_of_generator(value))
    if isinstance(value, _PLAIN) or depth == _MAX_DEPTH or not _is_opened(value):
        return Content(value, None)
    if type(value) is set:
        return Content(value, set(value))
    return Content(value, {key: _take(item, depth + 1) for key, item in _items(value).items()})


def _is_opened(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        return len(value) <= _MAX_ITEMS
    if isinstance(value, nn.Module):
        return True
    return hasattr(value, "__dict__") and _is_of_task(sys.modules.get(getattr(value, "__module__", "")))


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return {name: _contents(cell) for name, cell in cells}
    return dict(vars(value))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _has_module_of(value: Any, own: Collection[int], depth: int = 0) -> bool:
    """Return whether a module of the model is in it."""
    if isinstance(value, nn.Module):
        return any(id(module) in own for module in value.modules())
    is_container = type(value) in _CONTAINERS and len(value) <= _MAX_ITEMS and depth < _MAX_DEPTH
    return is_container and any(_has_module_of(item, own, depth + 1) for item in _items_of(value))


def _items_of(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value


def _values(owners: Mapping[str, object]) -> Iterator[tuple[Place, Any]]:
    for name, owner in owners.items():
        is_module = isinstance(owner, nn.Module)
        for key, value in list(vars(owner).items()):
            is_own = not key.startswith("__") and not (is_module and key in _OF_MODULES)
            if is_own and not isinstance(value, (type, ModuleType, property, staticmethod, classmethod)):
                yield (name, key), value


def _is_of_task(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not file.startswith(TASKS) and owner_of(file) is FrameOwner.TASK


def _set(owner: object, key: str, value: Any) -> None:
    """Not by `setattr` of a module, which would have its own idea of a tensor."""
    if isinstance(owner, type):
        delattr(owner, key) if value is _Missing else setattr(owner, key, value)
    elif value is _Missing:
        vars(owner).pop(key, None)
    else:
        vars(owner)[key] = value
