"""Layout of the exact gradients: one accumulator per FSDP unit, divided among ranks as FSDP divides parameters.

    unit's accumulator, float64, world size 3          parameter of 7 rows: chunks of ceil(7 / 3) = 3 rows
    rank 0's chunk  | rows 0 1 2 of w | bias ... |
    rank 1's chunk  | rows 3 4 5 of w | bias ... |     columns beyond the last row stay zero
    rank 2's chunk  | row  6 - - of w | bias ... |     a complex number has two columns

So an all-to-all of the accumulator's rows brings each rank its own shard, without packing. Called by `ExactGradients`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

PIECE = 1 << 17
"""Elements: few enough for the processor's caches, and enough that the calls cost little."""


@dataclass(slots=True, eq=False)
class Slot:
    """One trainable parameter's columns in its unit's accumulator."""

    owner: nn.Module
    name: str
    """The owner's attribute: the whole parameter while the unit is gathered, the shard otherwise."""
    shard: DTensor
    sums: Tensor
    """View of the accumulator: [world size, elements per rank with FSDP's padding]."""
    was_touched: bool = False
    """Whether a micro-batch of this step had a gradient for it on this rank."""

    @property
    def num_real(self) -> int:
        """Real numbers in the whole parameter."""
        return numel_of_real(self.shard, self.shard.numel())

    def pieces(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """`flat`: one real number for each of the whole parameter. Pieces of it, each with its part of the sums."""
        width = self.sums.shape[1]
        for rank, sums in enumerate(self.sums):
            own = flat[rank * width : (rank + 1) * width]
            for start in range(0, own.numel(), PIECE):
                piece = own[start : start + PIECE]
                yield piece, sums[start : start + piece.numel()]

    def clear_if_untouched(self) -> None:
        """Drop what is left of an earlier pass; what lies beyond the last row is always zero."""
        if not self.was_touched:
            self.sums.zero_()


@dataclass(slots=True, eq=False)
class Unit:
    """An FSDP module and the parameters that it gathers."""

    module: nn.Module
    slots: list[Slot]
    sums: Tensor
    """The accumulator: [world size, elements per rank], contiguous."""


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a model sharded by FSDP2 along dim 0 of every parameter over one mesh axis; accumulators zeroed."""
    units: list[Unit] = []
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        found: list[tuple[nn.Module, str, DTensor]] = []
        for owner, name, shard in _own_parameters(module):
            if shard.requires_grad and shard.numel() and id(shard) not in seen:
                seen.add(id(shard))
                found.append((owner, name, _checked(name, shard)))
        if found:
            units.append(_unit(module, found))
    return units


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters that no inner unit gathers."""
    for name, parameter in module.named_parameters(recurse=False):
        yield module, name, parameter
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


def _checked(name: str, parameter: nn.Parameter) -> DTensor:
    placements = parameter.placements if isinstance(parameter, DTensor) else None
    if placements != (Shard(0),):
        raise NotImplementedError(
            f"deterministic: true needs every parameter sharded by rows over one axis; {name!r} is laid out as "
            f"{placements or 'a plain tensor'}. Set deterministic to false, or use data-parallel sharding only."
        )
    assert isinstance(parameter, DTensor)
    return parameter


def _unit(module: nn.Module, found: list[tuple[nn.Module, str, DTensor]]) -> Unit:
    world_size = found[0][2].device_mesh.size()
    device = found[0][2].to_local().device
    widths = [numel_of_real(shard, chunk_numel(shard.shape, world_size)) for *_, shard in found]
    sums = torch.zeros(world_size, sum(widths), dtype=torch.float64, device=device)
    views = torch.split(sums, widths, dim=1)
    return Unit(module, [Slot(*one, view) for one, view in zip(found, views, strict=True)], sums)


def chunk_numel(shape: torch.Size, world_size: int) -> int:
    """Elements of the largest chunk of rows that FSDP2 gives to a rank."""
    return -(-shape[0] // world_size) * shape[1:].numel()


def real_view(tensor: Tensor) -> Tensor:
    """Of a complex tensor: real and imaginary parts, in one more dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def numel_of_real(tensor: Tensor, num_elements: int) -> int:
    return num_elements * (2 if tensor.is_complex() else 1)
