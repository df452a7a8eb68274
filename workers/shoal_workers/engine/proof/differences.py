"""How two sides of a proof differ: numbers, tensors, each parameter over all ranks, and the outputs of modules.

A split output is compared with the part of the whole one that this rank should have: equal shapes as they are, a
DTensor by its place, and a dim that is shorter by the degree of tp or cp as that axis cuts it. What is cut in another
way (inside an operation that the plan does not know) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.model.initial_weights import box_of
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.head_tail import own_part
from shoal_workers.engine.parallel.split_output import SplitOutput
from shoal_workers.engine.parallel.stages import Elsewhere
from shoal_workers.engine.proof.plain_loop import norm

SAME = 1e-6
"""Relative difference between a restored run and the one that went on: the same operations on the same numbers differ
on a GPU only."""


def relative(expected: float, actual: float) -> float:
    if expected == actual or (math.isnan(expected) and math.isnan(actual)):
        return 0.0
    difference = abs(actual - expected) / (abs(expected) + 1e-6)
    return difference if math.isfinite(difference) else math.inf


def real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def are_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    one, other = real(one).double(), real(other).double()
    finite = one[one.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=SAME * largest, equal_nan=True)


@torch.no_grad()
def differences(
    assembly: Assembly,
    aliases: Mapping[str, str],
    expected: Mapping[str, Tensor],
    scales: Mapping[str, float],
    value_of: Callable[[Tensor], Tensor | None],
    device: torch.device,
) -> dict[str, float]:
    """All ranks: of each name in `scales`, the norm of the difference over its scale. Equal on all ranks.

    Infinite: no rank has all of the parameter.

    Args:
        expected: whole tensors by name, the same on every rank; missing: zeros.
        scales: by the names of parameters of the whole model.
        aliases: other names of the same parameters.
        value_of: of a rank's parameter what is compared.
    """
    names = [*scales, *(alias for alias, owner in aliases.items() if owner in scales)]
    numbers = {name: number for number, name in enumerate(names)}
    copies = assembly.copies()
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for name, parameter in assembly.all_parameters():
        slices = slices_of(parameter)
        if slices is None or name not in numbers:
            continue
        value, whole = value_of(parameter), expected.get(aliases.get(name, name))
        own = None if value is None else local_tensor(value)
        part = None if whole is None else whole_dims(whole)[slices]
        share, delta = assembly.share(parameter), _distance(own, part)
        sums[numbers[name], 0] += share * delta * delta
        if whole is not None and part is not None and id(parameter) not in copies:
            sums[numbers[name], 1] += share * part.numel() / max(whole.numel(), 1)
    all_ranks().all_reduce(sums)
    deltas, parts = sums.sqrt()[:, 0].tolist(), sums[:, 1].tolist()
    relative_differences = {}
    for name, delta in zip(names, deltas, strict=True):
        scale = scales[aliases.get(name, name)]
        relative_differences[name] = delta / scale if scale else delta
    for name in scales:
        held = parts[numbers[name]] + sum(parts[numbers[a]] for a, owner in aliases.items() if owner == name)
        if name in expected and expected[name].numel() and held < 0.999:
            relative_differences[name] = math.inf
    return relative_differences


def slices_of(parameter: Tensor) -> tuple[slice, ...] | None:
    """The part of the whole parameter that this rank has; None if it is not known."""
    box = box_of(parameter)
    if box is None:
        return None
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))


def whole_dims(tensor: Tensor) -> Tensor:
    """A scalar has one dimension in a model that trains (`make_plain`)."""
    return tensor if tensor.ndim else tensor.view(1)


def _distance(own: Tensor | None, part: Tensor | None) -> float:
    if own is None or part is None:
        return norm(part if own is None else own)
    return norm(own.to(part.dtype) - part.view_as(own))


@dataclass(slots=True)
class Outputs:
    """The first output of each module, in the order in which they were computed."""

    by_name: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def recorded(self, *models: nn.Module) -> Iterator[None]:
        """Records the outputs of the modules while the models run."""
        modules = (named for model in models for named in model.named_modules())
        with ExitStack() as hooks:
            for name, module in modules:
                if name and not isinstance(module, Elsewhere):  # another stage computes it
                    hooks.enter_context(module.register_forward_hook(self._hook(name)))
            yield

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if name in self.by_name or not isinstance(output, Tensor) or not output.is_floating_point():
                return
            if isinstance(output, SplitOutput):
                output = output.whole()
            if not torch.isnan(output).all():  # else of what a pipeline's stage does not know: see parallel/stages.py
                self.by_name[name] = output.detach().clone()

        return record


@dataclass(frozen=True, slots=True)
class Differing:
    """A module whose output differs, on one rank."""

    number: int
    """Number in the order of the whole model."""
    name: str
    difference: float


def first_differing(whole: Outputs, split: Outputs, meshes: Meshes, tolerance: float) -> Differing | None:
    """The first one on this rank; None if no output that can be compared differs."""
    for number, (name, expected) in enumerate(whole.by_name.items()):
        if name not in split.by_name:
            continue
        difference = difference_of(expected, split.by_name[name], meshes)
        if difference is not None and not difference <= tolerance:
            return Differing(number, name, difference)
    return None


def difference_of(whole: Tensor, split: Tensor, meshes: Meshes) -> float | None:
    """Relative, of the part that this rank has; None if it is not known which part that is."""
    local_part = local_tensor(split)
    if isinstance(split, DTensor):
        slices = slices_of(split)
        if slices is None or tuple(split.shape) != tuple(whole.shape):
            return None
        parts = [whole[slices]]
    else:
        parts = list(_parts(whole, tuple(local_part.shape), meshes))
    norms = [relative_norm(part, local_part) for part in parts if part.shape == local_part.shape]
    return min(norms, default=None)


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


def relative_norm(expected: Tensor, part: Tensor) -> float:
    difference = torch.linalg.vector_norm((expected.double() - part.double()).flatten())
    scale = torch.linalg.vector_norm(expected.double().flatten())
    return float(difference / scale) if scale > 0 else float(difference)
