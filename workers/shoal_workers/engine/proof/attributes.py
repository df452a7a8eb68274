"""What a program may carry from one micro-batch to the next outside of parameters and buffers, as it is at a moment.

    owners      the task, the modules of Python that belong to it with their classes, and all modules of its model
    values      numbers, texts, tensors, arrays, random generators, counters; lists, dicts, queues, caches ... of these;
                modules that are not in the model (a teacher in an attribute, or in a list); objects of the task's own
                classes, also with __slots__; what their functions and methods, and partial calls, hold
    unknown     iterators whose position cannot be read, and caches that forget what they hold

What it holds is set back in place, so that other references to a list or a tensor see it, too. What was not there
before is removed, whatever it is. Used by `prove`.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import queue
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import (
    CellType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal_workers.engine.randomness import is_generator, set_generator, state_of_generator
from shoal_workers.engine.task.code_owner import is_file_of_task
from shoal_workers.engine.task.reachable import ITERATORS, attributes_of, position_of, slots_of
from shoal_workers.torch_internals import forward_hooks

_MAX_ITEMS = 10_000
"""Longer containers are data."""
_MAX_DEPTH = 5
_FAR = 999_999
"""Larger than any threshold, and one less than a multiple of many numbers, so that `(i + 1) % 10 == 0` holds."""
_NUM_GROWN = 1_000
"""Items that are added to a list that grows."""
_MAX_BYTES = 16 << 20
"""Larger tensors are data: only torch's count of their changes is compared."""
_CONTAINERS = (list, tuple, dict, deque, set, OrderedDict, defaultdict, Counter)
_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)
_CACHE = type(functools.lru_cache(len))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))

_DATA_SET = "the data set"
"""Name of this owner."""
_COUNTERS = (bool, int, float, itertools.count)

Place = tuple[str, str]
"""Name of an owner, and of its attribute."""


def owners_in_task(task: object, data: object = None) -> dict[str, object]:
    """What may carry state beside the model, by what people call it. `data`: the data set, of which only counters are
    looked at."""
    if has_no_state(task):
        return {}
    modules = {name: module for name, module in list(sys.modules.items()) if is_file_of_task(module)}
    classes = {
        f"the class {kind.__name__}": kind
        for name, module in modules.items()
        for kind in list(vars(module).values())
        if isinstance(kind, type) and kind.__module__ == name
    }
    named = {f"the module {name}": module for name, module in modules.items()}
    is_of_engine = data is None or type(data).__module__.startswith("shoal_workers.")
    data_owner = {} if is_of_engine else {_DATA_SET: data}
    return {"the task": task, **data_owner, **classes, f"the class {type(task).__name__}": type(task), **named}


def owners_in_model(parts: Collection[nn.Module]) -> dict[str, object]:
    owners: dict[str, object] = {}
    for name, module in (item for part in parts for item in part.named_modules()):
        if type(module).__module__.startswith("shoal_workers."):
            continue
        owners[name or "the model"] = module
        if not has_no_state(module) and type(module) not in owners.values():
            owners[f"the class of {name or 'the model'}"] = type(module)
        if hooks := forward_hooks(module):
            named = {f"hook {number}": hook for number, hook in enumerate(hooks)}
            owners[f"{name or 'the model'}, in its hooks"] = SimpleNamespace(**named)
    return owners


def has_no_state(owner: object) -> bool:
    """True if its class is torch's or the engine's: those keep no state in plain attributes."""
    return all(kind.__module__.startswith(("torch.", "shoal_workers.")) for kind in type(owner).__mro__[:-1])


class Attributes:
    """The attributes of some objects, as they are now."""

    def __init__(self, owners: Mapping[str, object]) -> None:
        self._owners = dict(owners)
        self._before = {place: _take(value) for place, value in _values(owners)}

    def changed(self, model: Collection[nn.Module] = ()) -> dict[Place, Content]:
        """The attributes that have another value now, without the model itself."""
        own = {id(module) for part in model for module in part.modules()}
        return {place: _take(value) for place, value in self._changed() if not _has_module_of(value, own)}

    def unknown(self) -> list[Place]:
        """The attributes with an iterator that does not tell its position, or with a changed cache that forgets."""
        changed = {place for place, _ in self._changed()}
        found = [(place, _unknown_in(_take(value))) for place, value in _values(self._owners)]
        return [place for place, is_changing in found if is_changing or (is_changing is not None and place in changed)]

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
            _set(target, key, content.restored(attributes_of(target).get(key)))


def far(values: Mapping[Place, Content], later: Mapping[Place, Content]) -> dict[Place, Content]:
    """Returns what has numbers, with others in their place, which any condition would tell from these. In a container
    or a tensor only those that have changed again until `later`: the others are remembered. A list that has grown
    again is longer. Both are of `changed`."""
    others = {
        place: _far(content, None if isinstance(content.value, _PLAIN) else later.get(place, content))
        for place, content in values.items()
    }
    return {place: content for place, content in others.items() if content is not None}


def _far(content: Content, later: Content | None) -> Content | None:
    """None if it has no number that is another one `later`."""
    value, inside = content.value, content.inside
    if type(value) in (bool, int, float):
        is_kept = later is not None and later.is_same(value)
        return None if is_kept else Content(not value if isinstance(value, bool) else type(value)(_FAR), None)
    if isinstance(value, itertools.count):
        return Content(value, (_FAR, *inside[1:])) if later is not None and later.inside != inside else None
    if isinstance(inside, (Tensor, np.ndarray)):
        if later is None or later.is_same(inside) or getattr(later.inside, "shape", None) != inside.shape:
            return None  # of another shape: it is made anew when it is needed
        return Content(value, _far_elements(inside))
    if not isinstance(inside, dict) or later is None or not isinstance(later.inside, dict):
        return None
    both = inside.keys() & later.inside.keys() if not isinstance(value, (nn.Module, _CACHE)) else set()
    others = {key: other for key in both if (other := _far(inside[key], later.inside[key])) is not None}
    if isinstance(value, (list, deque)) and 0 < len(inside) < len(later.inside):
        others |= {len(inside) + number: inside[number % len(inside)] for number in range(_NUM_GROWN)}
    return Content(value, inside | others) if others else None


def _far_elements(values: Any) -> Any:
    """Others of the same type and shape, of a tensor or an array."""
    if isinstance(values, np.ndarray):
        return values if values.dtype.kind not in "biuf" else ~values if values.dtype.kind == "b" else values + 1
    if values.dtype is torch.bool:
        return ~values
    return torch.full_like(values, _FAR) if values.numel() == 1 and values.itemsize > 2 else values + 1


def _unknown_in(content: Content) -> bool | None:
    """Return whether it has an iterator that does not tell its position; None: nothing unknown; False: only caches."""
    if hasattr(type(content.value), "__next__") or isinstance(content.value, queue.SimpleQueue):
        is_known = isinstance(content.value, ITERATORS) or _is_unused(content.value)
        return None if is_known else True
    if isinstance(content.value, _CACHE):
        return None if isinstance(content.inside, dict) else False
    items = content.inside.values() if isinstance(content.inside, dict) else ()
    return max((kind for item in items if (kind := _unknown_in(item)) is not None), default=None)


class _Missing:
    """In place of an attribute that is not there."""


def _is_unused(value: Any) -> bool:
    return isinstance(value, GeneratorType) and inspect.getgeneratorstate(value) == inspect.GEN_CREATED


@dataclass(frozen=True, slots=True)
class Content:
    """A value and what it contains."""

    value: Any
    inside: Any
    """A copy of the values of a tensor, array or generator; the position of an iterator; or of each item what it
    contains. None if only the value's identity counts."""

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
        if isinstance(inside, tuple):
            return _position(now) == inside
        items = _items(now)
        if items.keys() != inside.keys() or (isinstance(value, dict) and list(items) != list(inside)):
            return False
        return all(one.is_same(items[key]) for key, one in inside.items())

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
        elif isinstance(self.value, itertools.count):
            return itertools.count(*inside)
        elif isinstance(self.value, _CACHE) and isinstance(inside, tuple):
            target.cache_clear()
        elif isinstance(inside, tuple):
            target.__setstate__(*inside)
        else:
            return self._filled(target, inside)
        return target

    @staticmethod
    def _filled(target: Any, inside: Mapping[Any, Content]) -> Any:
        """What cannot have other items keeps them: they are set back in place."""
        now = _items(target)
        items = {key: one.restored(now.get(key, one.value)) for key, one in inside.items()}
        if isinstance(target, dict):
            target.clear()
            target.update(items)
        elif isinstance(target, (list, deque)):
            target.clear()
            target.extend(items.values())
        elif isinstance(target, tuple):
            is_whole = len(target) == len(items) and all(one is items[at] for at, one in now.items())
            kind: Any = type(target)
            named = kind is not tuple
            return target if is_whole else kind(*items.values()) if named else tuple(items.values())
        elif isinstance(target, FunctionType):
            for name, cell in _cells(target).items():
                cell.cell_contents = items.get(name, cell.cell_contents)
            target.__defaults__ = items[_DEFAULTS]
        elif not isinstance(target, (nn.Module, functools.partial, MethodType, _CACHE, *_QUEUES)):
            for name in now.keys() - items.keys():
                _set(target, name, _Missing)
            for name, item in items.items():
                _set(target, name, item)
        return target


_DEFAULTS = "__defaults__"


def _take(value: Any, above: tuple[int, ...] = ()) -> Content:
    """`above`: ids of what it is in."""
    if isinstance(value, Tensor):
        is_kept = value.nbytes <= _MAX_BYTES and value.layout is torch.strided
        return Content(value, value.detach().clone() if is_kept else value._version)
    if isinstance(value, np.ndarray):
        is_kept = value.nbytes <= _MAX_BYTES and value.dtype != object
        return Content(value, value.copy() if is_kept else None)
    if is_generator(value):
        return Content(value, state_of_generator(value))
    if isinstance(value, _PLAIN) or len(above) == _MAX_DEPTH or id(value) in above or not _is_opened(value):
        return Content(value, None)
    if type(value) is set:
        return Content(value, set(value))
    if isinstance(value, (_CACHE, *ITERATORS)) and (position := _position(value)):
        return Content(value, position)
    return Content(value, {key: _take(item, (*above, id(value))) for key, item in _items(value).items()})


def _is_opened(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        return len(value) <= _MAX_ITEMS
    if isinstance(value, (type, ModuleType)):
        return False
    if isinstance(value, (nn.Module, functools.partial, MethodType, *ITERATORS)) or type(value) in _QUEUES:
        return True
    return is_file_of_task(sys.modules.get(getattr(value, "__module__", "")))


def _position(value: Any) -> tuple[Any, ...]:
    """That of an iterator; of a cache that forgets how much it has and had; empty for one that keeps all."""
    if isinstance(value, _CACHE):
        info = value.cache_info()
        return () if info.maxsize is None else (info.misses, info.currsize)
    return position_of(value)


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        owner = value.__self__
        return {"__self__": owner} if not isinstance(owner, nn.Module) and _is_opened(owner) else {}
    if type(value) in _QUEUES:
        return {"queue": value.queue}
    if isinstance(value, _CACHE):
        return {"cache": next(item for item in gc.get_referents(value) if type(item) is dict)}
    if isinstance(value, FunctionType):
        cells = {name: cell.cell_contents for name, cell in _cells(value).items()}
        return {**cells, _DEFAULTS: value.__defaults__, "__kwdefaults__": value.__kwdefaults__, "__dict__": vars(value)}
    return attributes_of(value)


def _cells(function: FunctionType) -> dict[str, CellType]:
    """Those that are not empty."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if _is_filled(cell)}


def _is_filled(cell: CellType) -> bool:
    with suppress(ValueError):
        return cell.cell_contents is not _Missing
    return False


def _has_module_of(value: Any, own: Collection[int], depth: int = 0) -> bool:
    """Return whether a module of the model is in it."""
    if isinstance(value, nn.Module):
        return any(id(module) in own for module in value.modules())
    if isinstance(value, MethodType):
        return isinstance(value.__self__, nn.Module) and _has_module_of(value.__self__, own)
    is_container = type(value) in (*_CONTAINERS, functools.partial) and depth < _MAX_DEPTH and _is_opened(value)
    items = value if isinstance(value, set) else _items(value).values() if is_container else ()
    return any(_has_module_of(item, own, depth + 1) for item in items)


def _values(owners: Mapping[str, object]) -> Iterator[tuple[Place, Any]]:
    for name, owner in owners.items():
        is_module = isinstance(owner, nn.Module)
        for key, value in attributes_of(owner).items():
            is_own = not key.startswith("__") and not (is_module and key in _OF_MODULES)
            if name == _DATA_SET and not isinstance(value, _COUNTERS):
                continue  # what it has read, or remembers, which may be large
            if is_own and not isinstance(value, (type, ModuleType, property, staticmethod, classmethod)):
                yield (name, key), value


def _set(owner: object, key: str, value: Any) -> None:
    """Not by `setattr` of a module, which would have its own idea of a tensor."""
    if isinstance(owner, type):
        delattr(owner, key) if value is _Missing else setattr(owner, key, value)
    elif (slot := slots_of(type(owner)).get(key)) is not None:
        slot.__delete__(owner) if value is _Missing else slot.__set__(owner, value)
    elif value is _Missing:
        vars(owner).pop(key, None)
    else:
        vars(owner)[key] = value
