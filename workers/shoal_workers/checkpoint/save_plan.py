"""Plans which slices of which tensors this rank writes, and their offsets in its file, without communication.

    DTensor      each rank writes its own slice, as torch.distributed.checkpoint plans it; along mesh axes on which the
                 tensor is replicated, only the rank with coordinate 0 writes; along `REPLICATE`, if `every_replica`,
                 each rank does: a snapshot in memory then needs one replica of each shard
    plain        replicated: written by ranks with `owns_replicated`; a reader takes the lowest rank's copy
    empty slice  not written (with uneven sharding some ranks have none); a tensor that is empty as a whole is written

It must never need a collective, because it must work while other ranks are being lost. Called by the writer and the
snapshot store.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.index import ALIGNMENT_BYTES
from shoal_workers.torch_internals import local_of, spec_of

REPLICATE = "dp_replicate"
"""Name of the mesh axis along which ranks hold equal shards."""


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """One slice that this rank writes: the whole local tensor of `fqn`."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    items: tuple[PlannedItem, ...]
    total_bytes: int
    """Length of the file."""


def plan_save(state: Mapping[str, torch.Tensor], *, owns_replicated: bool, every_replica: bool = False) -> SavePlan:
    """Plan the slices in the order of `state`. ValueError if a tensor cannot be saved: a Partial DTensor, or one
    without storage."""
    mine = {fqn: tensor for fqn, tensor in state.items() if _is_writer(fqn, tensor, owns_replicated, every_replica)}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mine, is_coordinator=True)
    items: list[PlannedItem] = []
    end = 0
    for write_item in planner.create_local_plan().items:
        item = _place(write_item, -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        if item.nbytes or 0 in item.shape:
            items.append(item)
            end = item.file_offset + item.nbytes
    return SavePlan(tuple(items), end)


def plan_key(state: Mapping[str, torch.Tensor], *, owns_replicated: bool, every_replica: bool = False) -> Hashable:
    """Equal keys mean equal plans. A key costs a small part of a plan, so each save compares keys and reuses the plan.

    Meshes compare equal across ranks and generations, so the coordinate is part of the key.
    """
    coordinates: dict[int, tuple[int, ...]] = {}  # by mesh: there are few
    layouts: list[Hashable] = []
    for fqn, tensor in state.items():
        if not isinstance(tensor, DTensor):
            layouts.append((fqn, tensor.shape, tensor.dtype))
            continue
        spec = spec_of(tensor)
        mesh = spec.mesh
        coordinate = coordinates.get(id(mesh))
        if coordinate is None:
            coordinate = coordinates[id(mesh)] = tuple(mesh.get_coordinate() or ())
        layouts.append((fqn, spec.shape, tensor.dtype, spec.placements, mesh, coordinate))
    return owns_replicated, every_replica, tuple(layouts)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this process, without its gradient history.

    Avoids `to_local`, which creates that history first; a snapshot calls this for hundreds of tensors.
    """
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def _is_writer(fqn: str, tensor: torch.Tensor, owns_replicated: bool, every_replica: bool) -> bool:
    if tensor.device.type == "meta":
        raise ValueError(f"{fqn} is on the meta device: it has no values to save: materialize the model first")
    if not isinstance(tensor, DTensor):
        return owns_replicated
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"{fqn} has placements {tensor.placements}: a partial sum has no value to save: reduce it first"
        )
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the tensor's mesh
        return False
    names = tensor.device_mesh.mesh_dim_names or ("",) * len(coordinate)
    return all(
        at == 0 or (every_replica and name == REPLICATE)
        for name, at, placement in zip(names, coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def _place(write_item: WriteItem, file_offset: int) -> PlannedItem:
    data = write_item.tensor_data
    assert data is not None, f"{write_item.index.fqn} is not a tensor"
    dtype = data.properties.dtype
    return PlannedItem(
        fqn=write_item.index.fqn,
        dtype=dtype,
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
        file_offset=file_offset,
        nbytes=data.chunk.sizes.numel() * dtype.itemsize,
    )
