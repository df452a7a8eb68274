"""The variables of a running loop, as values that can be compared with those of another run of it.

Looks into the frames of the program's own functions, and at the globals of its own modules, for what can hold state:
tensors, numbers, texts, random generators, containers of these, everything with `state_dict`, and objects of classes of
the program; and at what tracked modules and optimizers have beside their state. What is none of these has no value
here. Called by the trials of a loop, on the training thread.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.contract.exception_causes import FrameOwner
from shoal_workers.engine.loop.tracked import find_own_attributes
from shoal_workers.engine.randomness import is_generator, state_of_generator
from shoal_workers.engine.task.code_owner import PACKAGE, line_of_name, owner_of

_MAX_DEPTH = 6
_MAX_VALUES = 5000
"""Values of one variable; of more, only the first ones are compared."""
_MAX_ELEMENTS = 1 << 18
"""Elements of a tensor that are kept; of a larger one, equally many that are spread over it."""
_REL, _ABS = 1e-5, 1e-6
_OF_CHANGE, _NUM_ROUNDINGS = 1e-4, 8
"""Share of what a tensor has changed by since the beginning, and roundings of its largest value, that no difference
reaches which is one of rounding."""
_TIMES_NOISE = 8
"""Differences of this many times what noise alone makes are none."""
_CONTAINERS = (list, dict, set, deque)
_OF_MODULES = frozenset(vars(nn.Module()))
_CALLER = str(PACKAGE / "engine" / "loop" / "loop_program.py")
"""Calls the function."""
_SHOAL = f"{PACKAGE.parent / 'shoal'}{os.sep}"

Value = Tensor | float | str
Values = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Variable:
    """One name of the program, and what it holds. `values`: by the path below the name."""

    file: str
    """The file that assigns it; empty if that is not known."""
    kind: str
    """state: tensors, generators, and what has `state_dict`; plain: numbers and texts; iterator."""
    values: Values


@dataclass(frozen=True, slots=True)
class Difference:
    path: str
    words: str
    """By how much."""


def variables_of(frame: FrameType, directory: Path, left_out: Mapping[int, object]) -> dict[str, Variable]:
    """Those of the frames below `frame` and of the modules whose file lies below `directory`. `left_out`: objects by
    their id, which are not looked at."""
    variables: dict[str, Variable] = {}
    for file, names in scopes(frame, directory):
        for name, value in names.items():
            if name.startswith("__") or name in variables or id(value) in left_out:
                continue
            with suppress(Exception):  # proxies may raise anything
                if isinstance(value, type):
                    continue
                kind, values = _kind_of(value), values_of(value, directory, left_out)
                if values or kind == "iterator" or isinstance(value, _CONTAINERS):
                    variables[name] = Variable(file, kind, values)
    return variables


def variables_of_collates(collates: Sequence[object], directory: Path) -> dict[str, Variable]:
    """What the objects that make batches keep, if they are the program's own."""
    variables: dict[str, Variable] = {}
    for collate in collates:
        owner = getattr(collate, "__self__", collate)
        if values := values_of(owner, directory):
            file = str(getattr(sys.modules.get(type(owner).__module__), "__file__", ""))
            variables[f"collate of {type(owner).__name__}"] = Variable(file, "state", values)
    return variables


def variables_in(objects: Mapping[str, object], directory: Path) -> dict[str, Variable]:
    """What modules and optimizers have beside their state: plain attributes, and buffers that no checkpoint holds."""
    variables: dict[str, Variable] = {}
    for name, tracked in objects.items():
        modules = tracked.named_modules() if isinstance(tracked, nn.Module) else ()
        parts = {".".join(filter(None, (name, prefix))): module for prefix, module in modules} or {name: tracked}
        for path, part in parts.items():
            attributes = find_own_attributes(part)
            if isinstance(part, nn.Module):
                attributes = {key: value for key, value in vars(part).items() if key not in _OF_MODULES}
                attributes |= {key: part._buffers[key] for key in part._non_persistent_buffers_set}
            for key, value in attributes.items():
                if not isinstance(value, nn.Module) and (values := values_of(value, directory)):
                    file = str(getattr(sys.modules.get(type(part).__module__), "__file__", ""))
                    variables[f"{path}.{key}"] = Variable(file, "plain", values)
    return variables


def variable_of_gradients(objects: Mapping[str, object]) -> dict[str, Variable]:
    """Which gradients are left from the step before; a restored process has none."""
    modules = [tracked for tracked in objects.values() if isinstance(tracked, nn.Module)]
    left = [parameter for module in modules for parameter in module.parameters() if parameter.grad is not None]
    return {"gradients that no update has used": Variable("", "plain", {"number": float(len(left))} if left else {})}


def values_of(value: Any, directory: Path, left_out: Mapping[int, object] | None = None) -> Values:
    """What `value` holds, by path; copies. What follows a value that cannot be copied (a meta tensor) is left out."""
    walk = _Walk(directory, dict(left_out or {}))
    with suppress(Exception):
        walk.visit(value, "", 0)
    return walk.values


def difference(
    before: Mapping[str, Value],
    after: Mapping[str, Value],
    *,
    first: Mapping[str, Value] | None = None,
    others: Sequence[Mapping[str, Value]] = (),
) -> Difference | None:
    """The largest one among the paths that both have, beyond the rounding of one machine.

    Args:
        first: the values when training began; tensors are then compared by what they have changed since.
        others: `before` of runs that rounding alone makes other ones.
    """
    largest: tuple[float, Difference] | None = None
    for path in sorted(before.keys() & after.keys()):
        base = None if first is None else first.get(path, 0.0)
        by = _distance(before[path], after[path], base)
        noises = [_distance(before[path], other[path], base, is_exact=True) for other in others if path in other]
        if by and max(noises, default=0.0) * _TIMES_NOISE >= by:
            continue
        if by and (largest is None or by > largest[0]):
            largest = by, Difference(path, _describe_difference(before[path], after[path], by))
    return largest[1] if largest else None


def _describe_difference(before: Value, after: Value, by: float) -> str:
    if isinstance(before, Tensor) and before.is_floating_point() and math.isfinite(by):
        return f"differs by {by:.3g}"
    if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
        return "has another value"
    return f"{after:.9g} instead of {before:.9g}"


def _distance(a: Value, b: Value, base: Value | None = None, *, is_exact: bool = False) -> float:
    """Return how far two values are apart; 0 if only by rounding, unless `is_exact`."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        if not a.is_floating_point():
            return float((a != b).sum())
        if not a.numel():
            return 0.0
        gap = (a.double() - b.double()).abs()
        by = float(gap.nan_to_num(nan=0.0 if torch.equal(a.isnan(), b.isnan()) else math.inf).max())
        return by if is_exact or by > _limit(a, base) else 0.0
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        is_equal = a == b or math.isclose(a, b, rel_tol=_REL, abs_tol=_ABS) or (math.isnan(a) and math.isnan(b))
        return 0.0 if is_equal and not is_exact else abs(a - b)
    return 0.0 if isinstance(a, str) and a == b else math.inf


def _limit(value: Tensor, base: Value | None) -> float:
    largest = float(value.double().abs().nan_to_num().max())
    if base is None:
        return _ABS + _REL * largest
    before = base if isinstance(base, Tensor) and base.shape == value.shape else torch.zeros(())
    change = float((value.double() - before.double()).abs().nan_to_num().max())
    return _OF_CHANGE * change + _NUM_ROUNDINGS * torch.finfo(value.dtype).eps * largest


def scopes(frame: FrameType, directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield file and variables of the program's frames from `frame` up to its function, then of its modules."""
    above: FrameType | None = frame
    while above is not None and above.f_code.co_filename != _CALLER:
        file = above.f_code.co_filename
        if above.f_code.co_name != "<module>" and is_below(file, directory):
            yield file, dict(above.f_locals)
        above = above.f_back
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and is_below(path, directory):
            yield path, dict(vars(module))


@functools.cache
def is_below(file: str, directory: Path) -> bool:
    """Return whether a file is part of the program, and no package that is installed below its directory."""
    start = f"{directory}{os.sep}"
    if not file.startswith(start) or file.startswith(_SHOAL):
        return False
    is_installed = bool({"site-packages", ".venv", "dist-packages"} & {*Path(file.removeprefix(start)).parts})
    return owner_of(file) is FrameOwner.TASK and not is_installed


def place_of(name: str, file: str) -> str:
    """Where it is assigned first: `train.py:12`. The file may be empty."""
    if not file:
        return "no variable"
    line = line_of_name(file, name.rpartition(".")[2])
    return f"{Path(file).name}:{line}" if line else Path(file).name


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "state" if value.numel() > 1 else "plain"
    if is_generator(value):
        return "state"
    if hasattr(value, "__next__"):
        return "iterator"
    if isinstance(value, (bool, int, float, str, list, tuple, deque)):
        return "plain"
    return "state"


def _has_state(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None))


class _Walk:
    def __init__(self, directory: Path, seen: dict[int, object]) -> None:
        self.values: Values = {}
        self._directory = directory
        self._seen = seen

    def visit(self, value: Any, path: str, depth: int) -> None:
        if len(self.values) >= _MAX_VALUES or depth > _MAX_DEPTH:
            return
        if isinstance(value, (bool, int, float)):
            self.values[path] = float(value)
            return
        if isinstance(value, str):
            self.values[path] = value
            return
        if value is None or id(value) in self._seen or isinstance(value, (type, ModuleType)):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self.values[path] = _copy_values(value)
        elif isinstance(value, np.ndarray):
            if value.dtype.kind in "biuf":
                self.values[path] = _copy_values(torch.from_numpy(np.ascontiguousarray(value)))
        elif is_generator(value):
            self.values[path] = f"state {zlib.crc32(state_of_generator(value)):08x}"
        else:
            for key, item in _parts(value, self._directory):
                self.visit(item, f"{path}.{key}" if path else str(key), depth + 1)


def _parts(value: Any, directory: Path) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return [(key, item) for key, item in list(value.items()) if isinstance(key, (str, int, float))]
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(list(value)))
    if _has_state(value):
        try:
            return list(value.state_dict().items())
        except Exception:  # of the program: what it does not tell is not compared
            return []
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    if isinstance(file, str) and is_below(file, directory) and hasattr(value, "__dict__"):
        return list(vars(value).items())
    return []


def _copy_values(tensor: Tensor) -> Tensor:
    # A sharded one is gathered, by all ranks: it is read in another process.
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    flat = whole.detach().cpu().reshape(-1)
    every = -(-flat.numel() // _MAX_ELEMENTS) or 1
    return flat[::every].clone()
