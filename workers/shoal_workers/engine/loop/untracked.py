"""Notes which state a loop changes and does not track, so that no restore goes on without it in silence.

    first micro-batch    what the variables of the program hold as the function begins
    commit of a step     which of them hold something else now: said once, and saved with the state of the step
    after a restore      a variable that does not hold what the saved state says ends the job, with its name

State is what the model that comes out can consist of or depend on: generators, schedules, tensors and arrays that have
the shape of a tracked matrix (averages, masks, copies of weights, states of optimizers), and parameters of modules that
are not tracked. Numbers, texts and other tensors are mostly lists of losses, clocks, counts, metrics. Whether the first
steps depend on these is proven (proof.py); a restore names those that begin anew, and goes on. Called by `Run` on the
training thread.
"""

from __future__ import annotations

import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from shoal_workers.checkpoint.save_plan import local_tensor
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
_MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class _Digest:
    """What a variable holds."""

    total: float = 0.0
    """Sum of the magnitudes of tensors and arrays that are state, each with a factor of its place."""
    text: str = ""
    """Checksum of generators; or the state of a schedule."""
    rest: int = 0
    """Checksum of numbers and texts, and of places and versions of other tensors: for this process only."""

    def has_state_of(self, other: _Digest) -> bool:
        return self.text == other.text and math.isclose(self.total, other.total, rel_tol=_REL)


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
        self._generators: dict[int, tuple[Any, int, bytes]] = {}
        """Generators of torch by id, each with the seed that it had last and the state in which it was first seen."""
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
        """Return digest and file of each variable of the program by name."""
        directory = Path.cwd()
        tracked = {id(tracked) for tracked in self._objects.values()}
        roots: dict[str, tuple[Any, str]] = {}
        for file, names in scopes(sys._getframe(), directory):
            for name, value in names.items():
                is_shoal = type(value).__module__.startswith("shoal_workers.")
                if name.startswith("__") or is_shoal or id(value) in tracked:
                    continue
                is_own = is_below(str(getattr(sys.modules.get(type(value).__module__), "__file__", "")), directory)
                parts = attributes_of(value) if is_own and not isinstance(value, _WHOLE) else {}
                roots.setdefault(name, (None if parts else value, file))
                for key, part in parts.items():
                    roots.setdefault(f"{name}.{key}", (part, file))
        shapes = self._find_shapes()
        known = tracked | {id(self._run), *self._find_known(value for value, _ in roots.values())}
        return {name: (self._digest(value, known, shapes), file) for name, (value, file) in roots.items()}

    def _find_known(self, values: Iterator[Any]) -> Iterator[int]:
        """Yield ids of what is tracked, and of what belongs to data, whose order is Shoal's or has no effect."""
        for _, value in reachable(self._objects, ()):
            yield id(value)
        for tracked in self._objects.values():
            if isinstance(tracked, nn.Module):
                yield from map(id, tracked.modules())
        for value in values:
            if isinstance(value, (DataLoader, Dataset)):
                yield id(value)
                yield from (id(part) for _, part in reachable({"": value}, ()) if is_generator(part))

    def _find_shapes(self) -> set[tuple[int, ...]]:
        """Return the shapes of what is tracked and trains: those of matrices, and that of all parameters in a row."""
        modules = [tracked for tracked in self._objects.values() if isinstance(tracked, nn.Module)]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        shapes = {tuple(parameter.shape) for parameter in parameters if parameter.ndim > 1 and parameter.numel() > 1}
        return shapes | {(sum(p.numel() for p in module.parameters()),) for module in modules}

    def _digest(self, value: Any, known: set[int], shapes: set[tuple[int, ...]]) -> _Digest:
        if value is None or id(value) in known or isinstance(value, type):
            return _Digest()
        if isinstance(value, LRScheduler):
            return _Digest(text=json.dumps(value.state_dict(), default=repr))
        sums: list[Tensor] = []
        checksum = rest = 0
        for _, part in islice(reachable({"": value}, known), _MAX_VALUES):
            if is_generator(part):
                checksum = zlib.crc32(self._read_generator(part), checksum)
            elif isinstance(part, (Tensor, np.ndarray)) and (
                tuple(part.shape) in shapes or (isinstance(part, nn.Parameter) and part.numel() > 1)
            ):
                sums.append(_sum_magnitudes(part))
            else:
                rest = zlib.crc32(_describe_content(part).encode(), rest)
        numbers = torch.stack([number.double().to(sums[0].device) for number in sums]).tolist() if sums else []
        total = math.fsum(number * (1 + place % _NUM_FACTORS) for place, number in enumerate(numbers))
        return _Digest(total, f"{checksum:08x}" if checksum else "", rest)

    def _read_generator(self, generator: Any) -> bytes:
        """Return its state; the first one if it was seeded since the last step, as from the number of the step."""
        state = state_of_generator(generator)
        if not isinstance(generator, torch.Generator):
            return state
        seed = generator.initial_seed()
        _, last_seed, first_state = self._generators.get(id(generator), (generator, seed, state))
        self._generators[id(generator)] = generator, seed, first_state
        return state if seed == last_seed else first_state


def _describe_content(part: Any) -> str:
    if isinstance(part, Tensor):
        return f"{part.data_ptr()} {part._version}" if part.layout is torch.strided else ""
    if isinstance(part, (str, bytes)) and len(part) > _MAX_TEXT:
        return f"{id(part)}"
    return repr(part)


@torch.no_grad()
def _sum_magnitudes(part: Any) -> Tensor:
    """Return a scalar on the tensor's device."""
    tensor = local_tensor(part) if isinstance(part, Tensor) else torch.from_numpy(np.ascontiguousarray(part))
    if tensor.is_floating_point() or tensor.is_complex():
        return cast(Tensor, torch.linalg.vector_norm(tensor, 1))
    return tensor.sum(dtype=torch.float64)
