"""The gradients of a whole model against the shards of a split one, with one all-reduce. Called by the proof."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.engine.model.initial_weights import box_of
from shoal_workers.engine.parallel.assembly import Assembly

_FLOOR = 1e-3
"""Of the whole gradient's norm. A small gradient is a sum of large terms, and has their rounding."""


@torch.no_grad()
def gradient_differences(
    whole: Mapping[str, Tensor], aliases: Mapping[str, str], assembly: Assembly, device: torch.device
) -> dict[str, float]:
    """All ranks: of each parameter, the norm of the difference, relative to that of its gradient. Equal on all ranks.

    Infinite: no rank has all of the parameter.

    Args:
        whole: gradients by name, zeros for those that the step does not reach; the same on every rank.
        aliases: other names of the same parameters.
    """
    names = [*whole, *aliases]
    numbers = {name: number for number, name in enumerate(names)}
    copies = assembly.copies()
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for name, parameter in assembly.all_parameters():
        box = box_of(parameter)
        if box is None or name not in numbers:
            continue
        slices = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        expected = whole[aliases.get(name, name)][slices]
        own = torch.zeros_like(expected) if parameter.grad is None else local_tensor(parameter.grad)
        share = assembly.share(parameter)
        delta = torch.linalg.vector_norm((own.to(expected.dtype) - expected).flatten()).double()
        sums[numbers[name], 0] += share * delta * delta
        sums[numbers[name], 1] += 0.0 if id(parameter) in copies else share * expected.numel()
    dist.all_reduce(sums)
    deltas, present = sums.sqrt()[:, 0].tolist(), sums[:, 1].tolist()
    norms = {name: float(torch.linalg.vector_norm(gradient.flatten()).double()) for name, gradient in whole.items()}
    floor = _FLOOR * sum(norm**2 for norm in norms.values()) ** 0.5
    found = {}
    for name, delta in zip(names, deltas, strict=True):
        scale = norms[aliases.get(name, name)] + floor
        found[name] = delta / scale if scale else delta
    for name, gradient in whole.items():
        held = present[numbers[name]] + sum(present[numbers[a]] for a, owner in aliases.items() if owner == name)
        if held < gradient.numel() * 0.999:
            found[name] = float("inf")
    return found
