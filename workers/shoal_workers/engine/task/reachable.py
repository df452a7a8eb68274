"""What code of a user can keep between two calls: all values that an object leads to, each with a mark of its content.

Attributes of objects and modules, containers, closures and defaults of functions, bound objects: two objects with equal
marks behave equally, except by variables of modules, files and the time. Numbers and texts are their own marks, tensors
have their place in memory and torch's count of writes, generators their state, iterators their position. Called around
the step of an optimizer, and around the reading of a sample.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_workers.engine.randomness import is_generator, state_of_generator

_MAX_ITEMS = 10_000
"""Longer containers are data."""
ITERATORS: tuple[type, ...] = (itertools.count, type(iter([])), type(iter(())), type(iter(range(0))))
"""Those that tell their position."""
_MAX_BYTES = 16 << 20
"""Larger arrays are data."""
_PLAIN = (bool, int, float, complex, str, bytes)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_NO_CONTENT = (type, ModuleType, BuiltinFunctionType, torch.dtype, torch.device, torch.Size)


def marks(found: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Return a mark for each of these values, by its path."""
    return {path: _mark_of(value) for path, value in found}


def reachable(roots: Mapping[str, object], known: Collection[int]) -> Iterator[tuple[str, object]]:
    """Yield path and value of what has content: numbers, texts, tensors, arrays, generators; lengths of containers.

    Args:
        roots: objects by name.
        known: ids of objects that are looked after elsewhere, and not entered.
    """
    seen = set(known)
    stack: list[tuple[str, Any]] = list(roots.items())
    while stack:
        path, value = stack.pop()
        if value is None or isinstance(value, _PLAIN):
            yield path, value
        elif id(value) not in seen and not isinstance(value, _NO_CONTENT):
            seen.add(id(value))
            if isinstance(value, (Tensor, np.ndarray)) or is_generator(value):
                yield path, value
            elif isinstance(value, ITERATORS):
                yield path, position_of(value)
            elif isinstance(value, _CONTAINERS):
                yield f"{path}.__len__", len(value)
                if len(value) <= _MAX_ITEMS:
                    items = value.items() if isinstance(value, dict) else enumerate(value)
                    stack += [(f"{path}[{_key(key)}]", item) for key, item in items]
            else:
                stack += [(f"{path}.{name}", item) for name, item in _parts(value)]


def _key(key: object) -> str:
    return repr(key) if isinstance(key, (str, int)) else f"{type(key).__name__} {id(key)}"


def _mark_of(value: Any) -> object:
    match value:
        case Tensor():
            place = value.data_ptr() if value.layout is torch.strided else 0
            return id(value), place, value._version, value.requires_grad
        case np.ndarray():
            if value.nbytes > _MAX_BYTES:
                return id(value)
            return value.tobytes() if value.dtype.kind != "O" else repr(value)
    return state_of_generator(value) if is_generator(value) else repr(value)


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if isinstance(value, MethodType):
        yield from (("__self__", value.__self__), ("__func__", value.__func__))
    if isinstance(value, FunctionType):
        yield "__defaults__", value.__defaults__
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not yet assigned
                pass
    if isinstance(value, GeneratorType) and value.gi_frame is not None:
        yield "gi_frame.f_lasti", value.gi_frame.f_lasti
        yield "gi_frame.f_locals", dict(value.gi_frame.f_locals)
    yield from attributes_of(value).items()


def position_of(iterator: Any) -> tuple[Any, ...]:
    """Where one of `ITERATORS` is."""
    _, arguments, *position = iterator.__reduce__()
    return arguments if isinstance(iterator, itertools.count) else tuple(position)


def attributes_of(value: object) -> dict[str, Any]:
    """Those that it has, in `__slots__` too."""
    filled = dict[str, Any]()
    for name, slot in slots_of(type(value)).items():
        with suppress(AttributeError):
            filled[name] = slot.__get__(value)
    return {**filled, **getattr(value, "__dict__", {})}


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    every = ((name, slot) for base in kind.__mro__ if "__slots__" in vars(base) for name, slot in vars(base).items())
    return {name: slot for name, slot in every if isinstance(slot, MemberDescriptorType)}
