"""Which saved slices fill which part of the state: any layout from any layout.

Decided by the read planning of torch.distributed.checkpoint; the metadata that it wants are put together here, in
memory, from the ranks' indexes. A slice that several ranks wrote is read from the lowest. Unlike torch's planner alone,
this refuses a state that the saved slices do not cover.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.errors import DamagedCheckpoint, StateMismatch
from shoal_workers.checkpoint.index import IndexItem, ShardIndex, index_name, payload_name
from shoal_workers.checkpoint.save_plan import local_tensor


@dataclass(frozen=True, slots=True)
class Fill:
    """Copy this box of a saved slice there."""

    source_offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor
    """A view of the state's own memory, of shape `lengths`."""


@dataclass(frozen=True, slots=True)
class ItemRead:
    """One saved slice that has to be read, and everything that it fills."""

    file: str
    item: IndexItem
    dtype: torch.dtype
    fills: tuple[Fill, ...]


@dataclass(frozen=True, slots=True)
class _Saved:
    """Where every slice lies, and what the planner has to know of it."""

    metadata: dict[str, TensorStorageMetadata]
    places: dict[tuple[str, tuple[int, ...]], tuple[str, IndexItem]]


def plan_load(state: Mapping[str, torch.Tensor], indexes: Sequence[ShardIndex], *, directory: str) -> list[ItemRead]:
    """In the order in which the slices lie in their files. StateMismatch where the checkpoint lacks part of it."""
    saved = _collect(indexes, directory)
    _refuse_mismatch(state, saved.metadata, directory)
    fills: dict[tuple[str, tuple[int, ...]], list[Fill]] = defaultdict(list)
    filled: dict[str, int] = defaultdict(int)
    here = {fqn: local_tensor(tensor) for fqn, tensor in state.items()}
    for read in _read_items(state, saved.metadata):
        assert read.storage_index.offset is not None
        target = narrow_tensor_by_index(here[read.dest_index.fqn], read.dest_offsets, read.lengths)
        fill = Fill(tuple(read.storage_offsets), tuple(read.lengths), target)
        fills[read.storage_index.fqn, tuple(read.storage_index.offset)].append(fill)
        filled[read.dest_index.fqn] += prod(read.lengths)
    _refuse_holes(state, filled, directory)
    reads = [
        ItemRead(*saved.places[key], saved.metadata[key[0]].properties.dtype, tuple(parts))
        for key, parts in fills.items()
    ]
    return sorted(reads, key=lambda read: (read.file, read.item.file_offset))


def _read_items(state: Mapping[str, torch.Tensor], metadata: Mapping[str, TensorStorageMetadata]) -> Iterator[ReadItem]:
    """What torch's own load planner asks for, without computing a thousand times what tensors of equal layout share:
    there are some ten layouts in a model, and where its slice lies takes a DTensor most of the time of planning."""
    known: dict[Hashable, list[ChunkStorageMetadata]] = {}
    for fqn, tensor in state.items():
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is None:  # this rank is not in its mesh
                continue
            layout = tensor.shape, tensor.placements, tensor.device_mesh
            if layout not in known:
                known[layout] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            chunks = known[layout]
        else:
            chunks = [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)]
        yield from create_read_items_for_chunk_list(fqn, metadata[fqn], chunks)


def _collect(indexes: Sequence[ShardIndex], directory: str) -> _Saved:
    saved = _Saved({}, {})
    for index in indexes:
        for item in index.items:
            known = saved.metadata.get(item.fqn)
            dtype = dtype_of(item, index.rank, directory)
            if known is None:
                known = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(item.shape), [])
                saved.metadata[item.fqn] = known
            elif known.size != item.shape or known.properties.dtype != dtype:
                problem = (
                    f"says that {item.fqn} is {dtype} {item.shape}, "
                    f"lower ranks that it is {known.properties.dtype} {tuple(known.size)}"
                )
                raise DamagedCheckpoint(directory, index_name(index.rank), problem)
            if (item.fqn, item.offsets) not in saved.places:
                known.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
                saved.places[item.fqn, item.offsets] = payload_name(index.rank), item
    return saved


def dtype_of(item: IndexItem, rank: int, directory: str) -> torch.dtype:
    """DamagedCheckpoint if there is none of that name, or the slice has not as many bytes as it needs."""
    dtype = getattr(torch, item.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(directory, index_name(rank), f"gives {item.fqn} the unknown dtype {item.dtype!r}")
    if prod(item.sizes) * dtype.itemsize != item.nbytes:
        problem = f"gives {item.fqn} {item.nbytes} bytes for {item.dtype} of {item.sizes}"
        raise DamagedCheckpoint(directory, index_name(rank), problem)
    return dtype


def _refuse_mismatch(
    state: Mapping[str, torch.Tensor], saved: Mapping[str, TensorStorageMetadata], directory: str
) -> None:
    problems = []
    for fqn, tensor in state.items():
        if tensor.device.type == "meta":
            raise ValueError(f"{fqn} is on the meta device: it has no memory to load into")
        if fqn not in saved:
            problems.append(f"it has no {fqn}")
            continue
        here = tensor.dtype, tuple(tensor.shape)
        there = saved[fqn].properties.dtype, tuple(saved[fqn].size)
        if here != there:
            problems.append(f"{fqn} is {there[0]} {there[1]} in it, {here[0]} {here[1]} here")
    if problems:
        raise StateMismatch(directory, problems)


def _refuse_holes(state: Mapping[str, torch.Tensor], filled: Mapping[str, int], directory: str) -> None:
    problems = [
        f"of {fqn} it holds only {filled.get(fqn, 0)} of the {wanted} elements that this rank needs"
        for fqn, tensor in state.items()
        if not (isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None)
        and (wanted := local_tensor(tensor).numel()) != filled.get(fqn, 0)
    ]
    if problems:
        raise StateMismatch(directory, problems)
