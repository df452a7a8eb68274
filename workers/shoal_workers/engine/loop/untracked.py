"""Notes which state a loop changes and does not track, so that no restore goes on without it in silence.

    first micro-batch    what the variables of the program hold as the function begins
    commit of a step     which of them hold something else now: said once, and saved with the state of the step
    after a restore      a variable that does not hold what the saved state says ends the job, with its name

State is what the model that comes out can consist of: schedules, parameters of modules that are not tracked, and
variables with tensors of the shapes of several tracked parameters (averages, masks, copies of weights, states of
optimizers). Everything else is mostly losses, clocks, counts, metrics, batches and generators of a validation. Whether
the first steps depend on it is proven (proof.py); a restore names what begins anew, and goes on. DTensors are not
looked at: a rank has only its part of them. Called by `Run` on the training thread.
"""

from __future__ import annotations

import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from shoal_workers.engine.loop.variables import is_below, place_of, scopes
from shoal_workers.engine.randomness import is_generator, state_of_generator
from shoal_workers.engine.task.reachable import attributes_of, reachable

_LARGEST_S, _LARGEST_SHARE = 1.0, 0.01
"""CPU seconds, or their share of the time, that looking at variables may take; then steps are left out."""
_MAX_VALUES = 20_000
"""Values of one variable that are looked at."""
_MAX_TEXT = 1000
"""Longer texts are data."""
_WHOLE = (nn.Module, LRScheduler, DataLoader, Dataset, type)
"""Kinds of objects of the program's own classes whose attributes are no variables."""
_REL = 1e-6
"""Relative difference of sums that is rounding."""
_NUM_FACTORS = 7
_LEAST_SHAPES = 2
"""Shapes of tracked parameters that a copy of weights has: one alone may be that of a batch."""
_MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class _Digest:
    """What a variable holds."""

    total: float = 0.0
    """Sum of the magnitudes of tensors and arrays that are state, each with a factor of its place."""
    text: str = ""
    """The state of a schedule."""
    rest: int = 0
    """Checksum of numbers, texts and generators, and of places and versions of other tensors: for this process only."""

    def has_state_of(self, other: _Digest) -> bool:
        are_nan = math.isnan(self.total) and math.isnan(other.total)
        return self.text == other.text and (are_nan or math.isclose(self.total, other.total, rel_tol=_REL))


class UntrackedState:
    """That of one rank in one call of the function."""

    def __init__(self, objects: Mapping[str, object], run: object, say: Callable[[str], None]) -> None:
        """`objects`: what is tracked."""
        self.accepted: set[str] = set()
        """Names of variables that may begin anew."""
        self._objects = objects
        self._run = run
        self._say = say
        self._first: dict[str, _Digest] | None = None
        self._changed: dict[str, _Digest] = {}
        """State by name that has changed since the function began."""
        self._changed_rest: set[str] = set()
        """Names of variables of which something else has changed."""
        self._restored: dict[str, _Digest] = {}
        self._restored_rest: frozenset[str] = frozenset()
        """What the restored state says of the same."""
        self._started_mono = time.monotonic()
        self._spent_s = 0.0

    def save(self) -> dict[str, Any]:
        """Return what a saved state says of this."""
        state = {name: [digest.total.hex(), digest.text] for name, digest in self._changed.items()}
        saved = {"untracked": state, "untracked_rest": sorted(self._changed_rest)}
        return {key: value for key, value in saved.items() if value}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take what a restored state says of it."""
        state = saved.get("untracked", {})
        self._restored = {name: _Digest(float.fromhex(total), text) for name, (total, text) in state.items()}
        self._restored_rest = frozenset(saved.get("untracked_rest", ()))

    def begin(self) -> None:
        """A micro-batch begins: the first time, compare what the function begins with and the restored state.

        Raises:
            ValueError: a variable held something else when the state was saved.
        """
        if self._first is not None:
            return
        variables = self._read()
        first = self._first = {name: digest for name, (digest, _) in variables.items()}

        def describe(names: Iterable[str]) -> str:
            return ", ".join(f"{name} ({place_of(name, variables[name][1])})" for name in [*names][:_MAX_NAMES])

        known = [name for name in variables if not self._is_accepted(name)]
        lost = [name for name in known if name in self._restored and not first[name].has_state_of(self._restored[name])]
        if lost:
            roots = ", ".join(sorted({repr(name.split(".")[0]) for name in lost}))
            raise ValueError(
                f"this loop cannot go on as before: it has changed {describe(lost)}, which is not tracked and begins "
                "anew when the function is called again. Two ways out: track an object that has it in its "
                "state_dict(), run.track(..., name=...); or, if the model that comes out does not depend on it, say so "
                f"with run.untracked({roots})."
            )
        if rest := [name for name in known if name in self._restored_rest]:
            self._say(
                f"not tracked, and changed before this restore: {describe(rest)}. If the training depends on "
                "what begins anew, track it."
            )

    def note(self) -> None:
        """A step is complete: note what has changed since the function began."""
        start_s = time.thread_time()
        is_too_long = self._spent_s > max(_LARGEST_S, _LARGEST_SHARE * (time.monotonic() - self._started_mono))
        if self._first is None or is_too_long:
            return
        for name, (digest, file) in self._read().items():
            first, is_new = self._first.get(name), name not in self._changed
            if first is None:
                continue
            if digest.rest != first.rest:
                self._changed_rest.add(name)
            if is_new and digest.has_state_of(first):
                continue
            self._changed[name] = digest
            if is_new and not self._is_accepted(name):
                self._say(
                    f"{name} ({place_of(name, file)}) is not tracked, and has changed: a worker that goes on from a "
                    "saved state would begin without it, so the job would end there. Track an object that has it in "
                    "its state_dict(); or, if the model that comes out does not depend on it, say so with "
                    f"run.untracked({name.split('.')[0]!r})."
                )
        self._spent_s += time.thread_time() - start_s

    def _is_accepted(self, name: str) -> bool:
        return name in self.accepted or name.split(".")[0] in self.accepted

    def _read(self) -> dict[str, tuple[_Digest, str]]:
        """Return digest and file of each variable of the program by name, but for those that cannot be read: they may
        be proxies, or change on another thread."""
        directory = Path.cwd()
        tracked = {id(tracked) for tracked in self._objects.values()}
        roots: dict[str, tuple[Any, str]] = {}
        for file, names in scopes(sys._getframe(), directory):
            for name, value in [*names.items()]:
                if name.startswith("__") or id(value) in tracked:
                    continue
                with suppress(Exception):
                    for path, part in _divide(name, value, directory):
                        roots.setdefault(path, (part, file))
        known = tracked | {id(self._run), *self._find_known(value for value, _ in roots.values())}
        parameters = _TrackedParameters(self._objects)
        digests: dict[str, tuple[_Digest, str]] = {}
        for name, (value, file) in roots.items():
            with suppress(Exception):
                digests[name] = _digest(value, known, parameters), file
        return digests

    def _find_known(self, values: Iterable[Any]) -> Iterator[int]:
        """Yield ids of what is tracked, and of data, whose order is Shoal's or has no effect."""
        for _, value in reachable(self._objects, ()):
            yield id(value)
        for tracked in self._objects.values():
            yield from map(id, tracked.modules() if isinstance(tracked, nn.Module) else attributes_of(tracked).values())
        yield from (id(value) for value in values if isinstance(value, (DataLoader, Dataset)))


class _TrackedParameters:
    """Shapes and places of the parameters of tracked modules."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        modules = [tracked for tracked in objects.values() if isinstance(tracked, nn.Module)]
        parameters = [
            parameter
            for module in modules
            for parameter in module.parameters()
            if not isinstance(parameter, (DTensor, UninitializedParameter))
        ]
        self.shapes = {tuple(parameter.shape) for parameter in parameters if parameter.numel() > 1}
        self._places = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def may_be_copied_in(self, part: Any) -> bool:
        """Return whether a value may be a copy of a parameter. One that shares its memory is none."""
        if isinstance(part, np.ndarray):
            return part.shape in self.shapes and part.dtype.kind in "biufc"
        if not isinstance(part, Tensor) or isinstance(part, DTensor) or part.layout is not torch.strided:
            return False
        is_shape = tuple(part.shape) in self.shapes or (isinstance(part, nn.Parameter) and part.numel() > 1)
        return is_shape and not part.is_meta and part.untyped_storage().data_ptr() not in self._places


def _divide(name: str, value: Any, directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield a variable; of an object of the program's own classes instead the attributes."""
    module = type(value).__module__
    if module.startswith("shoal_workers."):
        return
    is_own = is_below(str(getattr(sys.modules.get(module), "__file__", "")), directory)
    parts = attributes_of(value) if is_own and not isinstance(value, _WHOLE) else {}
    yield name, None if parts else value
    for key, part in parts.items():
        yield f"{name}.{key}", part


def _digest(value: Any, known: Collection[int], parameters: _TrackedParameters) -> _Digest:
    """Return what a variable holds. Raises whatever its objects raise."""
    if value is None or id(value) in known or isinstance(value, type):
        return _Digest()
    if isinstance(value, LRScheduler):
        return _Digest(text=json.dumps(value.state_dict(), default=lambda part: type(part).__name__))
    copies: list[Any] = []
    rest = 0
    for _, part in islice(reachable({"": value}, known), _MAX_VALUES):
        if parameters.may_be_copied_in(part):
            copies.append(part)
        else:
            rest = zlib.crc32(_describe_content(part), rest)
    if len({tuple(part.shape) for part in copies}) < _LEAST_SHAPES and not any(
        isinstance(part, nn.Parameter) for part in copies
    ):
        for part in copies:
            rest = zlib.crc32(_describe_content(part), rest)
        return _Digest(rest=rest)
    sums = [_sum_magnitudes(part) for part in copies]
    numbers = torch.stack([number.double().to(sums[0].device) for number in sums]).tolist()
    return _Digest(math.fsum(number * (1 + place % _NUM_FACTORS) for place, number in enumerate(numbers)), "", rest)


def _describe_content(part: Any) -> bytes:
    if is_generator(part):
        return state_of_generator(part)
    if isinstance(part, Tensor):
        has_version = part.layout is torch.strided and not part.is_inference()
        return f"{part.data_ptr()} {part._version}".encode() if has_version else b""
    if isinstance(part, (str, bytes)) and len(part) > _MAX_TEXT:
        return f"{id(part)}".encode()
    return repr(part).encode()


@torch.no_grad()
def _sum_magnitudes(part: Any) -> Tensor:
    """Return a scalar on the tensor's device."""
    tensor = part if isinstance(part, Tensor) else torch.from_numpy(np.ascontiguousarray(part))
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.sum(dtype=torch.float64)
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return cast(Tensor, torch.linalg.vector_norm(tensor, 1, dtype=torch.float32 if is_half else None))
