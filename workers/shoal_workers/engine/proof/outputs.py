"""Names the first module whose output differs: hooks record every module's output, whole and split.

A split output is compared with the part of the whole one that this rank should have: equal shapes as they are, a
DTensor by its place, and a dim that is shorter by the degree of tp or cp as that axis cuts it. What is cut in another
way (inside an operation that the plan does not know) is left out. Called by the proof when something differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.model.initial_weights import box_of
from shoal_workers.engine.parallel.head_tail import own_part
from shoal_workers.engine.parallel.split_output import SplitOutput
from shoal_workers.engine.parallel.stage_forward import Elsewhere

TOLERANCE = 1e-3
"""Relative difference of an output that is not rounding."""


@dataclass(slots=True)
class Outputs:
    """The first output of each module, in the order in which they were computed."""

    by_name: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def recorded(self, *models: nn.Module) -> Iterator[None]:
        """While the models run."""
        handles = [
            module.register_forward_hook(self._hook(name))
            for model in models
            for name, module in model.named_modules()
            if name and not isinstance(module, Elsewhere)  # another stage computes it
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if name in self.by_name or not isinstance(output, Tensor) or not output.is_floating_point():
                return
            if isinstance(output, SplitOutput):
                output = output.whole()
            if not torch.isnan(output).all():  # else of what a pipeline's stage does not know: see stage_forward.py
                self.by_name[name] = output.detach().clone()

        return record


@dataclass(frozen=True, slots=True)
class Differing:
    """A module whose output differs, on one rank."""

    number: int
    """In the order of the whole model."""
    name: str
    difference: float


def first_differing(whole: Outputs, split: Outputs, meshes: Meshes) -> Differing | None:
    """The first one on this rank; None: no output that can be compared differs."""
    for number, (name, expected) in enumerate(whole.by_name.items()):
        if name not in split.by_name:
            continue
        found = difference_of(expected, split.by_name[name], meshes)
        if found is not None and not found <= TOLERANCE:
            return Differing(number, name, found)
    return None


def difference_of(whole: Tensor, split: Tensor, meshes: Meshes) -> float | None:
    """Relative, of the part that this rank has; None: it is not known which part that is."""
    own = local_tensor(split)
    if isinstance(split, DTensor):
        box = box_of(split)
        if box is None or tuple(split.shape) != tuple(whole.shape):
            return None
        slices = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        parts = [whole[slices]]
    else:
        parts = list(_parts(whole, tuple(own.shape), meshes))
    found = [_relative(part, own) for part in parts if part.shape == own.shape]
    return min(found, default=None)


def _parts(whole: Tensor, shape: tuple[int, ...], meshes: Meshes) -> Iterator[Tensor]:
    """What a rank may have of `whole` if its own part has this shape."""
    if len(shape) != whole.ndim:
        return
    if tuple(whole.shape) == shape:
        yield whole
        return
    tp = meshes.tp.size() if meshes.tp is not None else 1
    cp = meshes.cp.size() if meshes.cp is not None else 1
    for dim in range(whole.ndim):
        if meshes.cp is not None and whole.shape[dim] % (2 * cp) == 0:
            part = own_part(whole, meshes.cp.get_local_rank(), cp, dim)
            yield part
            yield from (cut for cut in _cuts(part, meshes, tp))
    yield from _cuts(whole, meshes, tp)


def _cuts(whole: Tensor, meshes: Meshes, tp: int) -> Iterator[Tensor]:
    if meshes.tp is None:
        return
    for dim in range(whole.ndim):
        if whole.shape[dim] % tp == 0:
            yield whole.chunk(tp, dim)[meshes.tp.get_local_rank()]


def _relative(expected: Tensor, found: Tensor) -> float:
    difference = torch.linalg.vector_norm((expected.double() - found.double()).flatten())
    scale = torch.linalg.vector_norm(expected.double().flatten())
    return float(difference / scale) if scale > 0 else float(difference)
