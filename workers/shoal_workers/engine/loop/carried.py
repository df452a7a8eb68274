"""Refuses what a loop carries from step to step into a loss outside of what it tracks: numbers, tensors, lists, random
generators, iterators, objects. Each rank has its own, and a new worker begins without it.

    loss_names.py     the names that the loss is computed from, and that an iteration reads before it assigns them
    here              their values in the first steps, also of those that the program's functions and modules read on
                      the way. What changes twice is refused, with its line

What only a log reads is none of them. Called by `Run` on the training thread, before a backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from shoal_workers.contract.exception_causes import FrameOwner
from shoal_workers.engine.loop.loss_names import read_by_loss, read_by_result
from shoal_workers.engine.loop.variables import Values, difference, values_of
from shoal_workers.engine.task.code_owner import PACKAGE, line_in, owner_of
from shoal_workers.engine.task.randomness import is_generator

_WATCHED_STEPS = 5
_MOST_CHANGES = 2
"""What changes once is made when it is first needed."""
_MAX_DEPTH = 3
"""Functions of the program that are read inside of each other."""
_VALUES = (bool, int, float, str, list, tuple, dict, set, Tensor, np.ndarray)
_Found = tuple[str, Any, str]
"""Name, value and line."""
_SHOAL = f"{PACKAGE.parent / 'shoal'}{os.sep}"


class Carried:
    """The names of one loop, in one generation."""

    def __init__(self, known: Mapping[int, object], modules: Collection[nn.Module]) -> None:
        """`known`: what is tracked, and the run, by id. `modules`: all that are tracked; what is registered in them
        may be another tensor in a forward pass, as FSDP has it."""
        self._known = dict(known)
        self._modules = {id(module): module for module in modules}
        self._step = -1
        self._num_steps = 0
        self._seen: dict[str, Values] = {}
        self._num_changes: dict[str, int] = {}

    def look(self, frame: FrameType | None, step: int) -> None:
        """Called with the frame that calls run.backward(). Raises ValueError."""
        if step == self._step or self._num_steps == _WATCHED_STEPS:
            return
        self._step, self._num_steps = step, self._num_steps + 1
        before, self._seen = self._seen, {}
        for name, value, place in self._carried(frame):
            if name in self._seen or id(value) in self._known:
                continue
            self._seen[name] = now = values_of(value, Path.cwd(), self._known)
            is_other = name in before and (len(now) != len(before[name]) or difference(before[name], now) is not None)
            self._num_changes[name] = self._num_changes.get(name, 0) + (is_other or hasattr(value, "__next__"))
            if self._num_changes[name] >= _MOST_CHANGES:
                raise ValueError(
                    f"{name} ({place}) changes from step to step, the loss or the learning rate depends on it, and "
                    "run.track() does not name it: each rank has its own, and a new worker begins without it. Two "
                    "ways out: track an object that has it in its state_dict(), and change it after the update, alike "
                    "on all ranks (by run.loss or run.step); or keep it in a buffer of a tracked module."
                )

    def _carried(self, frame: FrameType | None) -> Iterator[_Found]:
        """Yields name, value and line: of the function that calls run.backward(), and of those that call it, up to the
        loop."""
        is_call = False
        while frame is not None and _is_of_program(file := frame.f_code.co_filename):
            names, has_loop, given = read_by_loss(file, frame.f_code.co_firstlineno, frame.f_lineno, is_call=is_call)
            for found in self._values(names, {**frame.f_globals, **frame.f_locals}, file, 0):
                if found[0] in names or found[0].rpartition(".")[2] not in given:
                    yield found
            if has_loop:
                return
            frame, is_call = frame.f_back, True

    def _values(self, names: Mapping[str, int], scope: Mapping[str, Any], file: str, depth: int) -> Iterator[_Found]:
        for whole_name, line in names.items():
            name, value = self._resolved(whole_name, scope)
            function = value.__func__ if isinstance(value, MethodType) else value
            if isinstance(value, GeneratorType) and not _is_of_program(value.gi_code.co_filename):
                continue  # run.batches()
            if isinstance(function, FunctionType):
                yield from self._of_function(function, value, name, depth)
            elif isinstance(value, nn.Module):
                if not isinstance(scope.get("self"), nn.Module):  # else it is read with the outer module
                    yield from self._of_module(value, name, line_in(file, line, ""), depth)
            elif value is not None and not callable(value) and not isinstance(value, ModuleType):
                yield name, value, line_in(file, line, "")

    def _of_function(self, function: FunctionType, value: Any, name: str, depth: int) -> Iterator[_Found]:
        code = function.__code__
        if depth == _MAX_DEPTH or not _is_of_program(code.co_filename):
            return
        names, scope = read_by_result(code.co_filename, code.co_firstlineno), dict(function.__globals__)
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # empty
                scope[key] = cell.cell_contents
        if isinstance(value, MethodType):
            scope["self"] = value.__self__
        for found, inner, place in self._values(names, scope, code.co_filename, depth + 1):
            prefix = name.rpartition(".")[0] or name
            yield f"{prefix}{found[4:]}" if found.startswith("self.") else found, inner, place

    def _of_module(self, module: nn.Module, name: str, place: str, depth: int) -> Iterator[_Found]:
        """A module, if it is not tracked, and what forward passes of the program read of plain attributes."""
        yield name, module, place
        for prefix, inner in module.named_modules():
            forward, path = type(inner).forward, ".".join(filter(None, (name, prefix)))
            if isinstance(forward, FunctionType):
                method = MethodType(forward, inner)
                for found, value, line in self._of_function(forward, method, f"{path}.forward", depth):
                    if not _is_registered(inner, found.removeprefix(f"{path}.")):
                        yield found, value, line

    def _resolved(self, name: str, scope: Mapping[str, Any]) -> tuple[str, Any]:
        """The name and its value; of what is inside of a number, a tensor, a container or something known, that itself.
        None: it is not there, or part of what is tracked."""
        first, *keys = name.split(".")
        value, path = scope.get(first), first
        for key in keys:
            is_known = id(value) in self._known and path != "self"  # whose own forward pass is read
            if is_known or isinstance(value, _VALUES) or is_generator(value) or hasattr(type(value), "__next__"):
                break
            module = self._modules.get(id(value))
            if module is not None and _is_registered(module, key):
                return path, None
            try:
                value, path = getattr(value, key), f"{path}.{key}"
            except Exception:  # a property of the program
                return path, None
        return path, value


def _is_registered(module: nn.Module, key: str) -> bool:
    return key == "training" or key in module._parameters or key in module._buffers


def _is_of_program(file: str) -> bool:
    return owner_of(file) is FrameOwner.TASK and not file.startswith(_SHOAL)
