"""Plans which saved slices fill which parts of the state, from any layout into any layout.

Uses the read planning of torch.distributed.checkpoint, with metadata that is built in memory from the ranks' indexes. A
slice that several ranks wrote is read from the lowest rank of those whose index was read. Unlike torch's planner, this
refuses a state that the saved slices do not cover. Tensors that the caller names as optional may be absent, a whole
group at a time: a parameter has no optimizer state before its first gradient. Called by `reader` and by the snapshot
store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.errors import DamagedCheckpoint, StateMismatch
from shoal_workers.checkpoint.index import IndexItem, ShardIndex, index_name, payload_name
from shoal_workers.checkpoint.needed_parts import Follower, NeededParts, Wanted, group_of
from shoal_workers.checkpoint.save_plan import local_tensor


@dataclass(frozen=True, slots=True)
class Fill:
    """One box of a saved slice, and the part of the state that it fills."""

    source_offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor
    """A view of the state's own memory, of shape `lengths`."""


@dataclass(frozen=True, slots=True)
class ItemRead:
    """One saved slice that must be read, and all that it fills."""

    file: str
    item: IndexItem
    dtype: torch.dtype
    fills: tuple[Fill, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and type of a whole tensor in the source."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Saved:
    """The saved slices of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: dict[tuple[int, ...], tuple[str, IndexItem]]
    """The lowest rank's file and the slice in it, by the slice's offsets."""


@dataclass(frozen=True, slots=True)
class _Box:
    """The overlap of one saved slice, the `number`-th of its tensor, with this rank's part of the tensor."""

    number: int
    source_offsets: tuple[int, ...]
    target_offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    num_elements: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    reads: list[ItemRead]
    """Reads in the order of the slices in their files."""
    extra: dict[str, Any]
    """The plain values that rank 0 saved."""
    other_extras: tuple[dict[str, Any], ...] = ()
    """The plain values of the other parts that were opened."""
    absent: frozenset[str] = frozenset()
    """Optional tensors that the source lacks."""
    unread: Mapping[str, Shape] = field(default_factory=dict)
    """What the opened parts have, and the state has not."""


def plan_needed(
    state: Mapping[str, torch.Tensor],
    num_parts: int,
    read_indexes: Callable[[Sequence[int]], Iterable[ShardIndex]],
    *,
    directory: str,
    optional: Mapping[str, str] | None = None,
) -> LoadPlan:
    """Plan as `plan_load` does, but read only the indexes of rank 0 and of the ranks whose slices this rank needs.

    `read_indexes`: those of these ranks, which are ascending. Its errors pass through. `optional`: tensors of `state`
    that the source may lack, each with the tensor that it belongs to. The source lacks all of a group or none, see
    `group_of`."""
    optional = optional or {}
    needed = NeededParts(_wanted(state), num_parts, _followers(state, optional))
    indexes: dict[int, ShardIndex] = {}
    while chosen := needed.take():
        for rank, index in zip(chosen, read_indexes(chosen), strict=True):
            indexes[rank] = index
            needed.opened(rank, ((item.fqn, item.offsets, item.sizes) for item in index.items))
    ordered = [indexes[rank] for rank in sorted(indexes)]
    saved = _collect(ordered, directory)
    absent = _absent(optional, saved)
    present = {name: tensor for name, tensor in state.items() if name not in absent}
    reads = _plan(present, saved, directory)
    others = tuple(index.extra for index in ordered[1:])
    unread = {name: Shape(tensor.shape, tensor.dtype) for name, tensor in saved.items() if name not in state}
    return LoadPlan(reads, ordered[0].extra, others, absent, unread)


def _followers(state: Mapping[str, torch.Tensor], optional: Mapping[str, str]) -> dict[str, Follower]:
    followers = {}
    for name, owner in optional.items():
        tensor, other = state[name], state.get(owner)
        is_beside = isinstance(tensor, DTensor) and other is not None and _layout(tensor) == _layout(other)
        followers[name] = Follower(group_of(name), owner if is_beside else None)
    return followers


def _absent(optional: Iterable[str], saved: Mapping[str, _Saved]) -> frozenset[str]:
    """Return the optional tensors of whose group nothing is saved. If something else of the group is, it was saved for
    another optimizer."""
    groups = {group_of(name) for name in saved}
    return frozenset(name for name in optional if group_of(name) not in groups)


def _wanted(state: Mapping[str, torch.Tensor]) -> dict[str, Wanted]:
    wanted: dict[Hashable, Wanted] = {}
    wanted_tensors: dict[str, Wanted] = {}
    for fqn, tensor in state.items():
        layout = _layout(tensor)
        if layout not in wanted:
            is_here = not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None
            chunks = _chunks(tensor) if is_here else []
            boxes = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
            wanted[layout] = Wanted(tuple(tensor.shape), boxes)
        wanted_tensors[fqn] = wanted[layout]
    return wanted_tensors


def plan_load(state: Mapping[str, torch.Tensor], indexes: Sequence[ShardIndex], *, directory: str) -> list[ItemRead]:
    """Return the reads in the order of the slices in their files. StateMismatch if the checkpoint lacks a part of the
    state."""
    return _plan(state, _collect(indexes, directory), directory)


def _plan(state: Mapping[str, torch.Tensor], saved: Mapping[str, _Saved], directory: str) -> list[ItemRead]:
    _refuse_mismatch(state, saved, directory)
    planner = _Planner()
    reads: list[ItemRead] = []
    holes: list[str] = []
    for fqn, tensor in state.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:  # this rank is not in its mesh
            continue
        saved_tensor, here = saved[fqn], local_tensor(tensor)
        places = list(saved_tensor.slices.values())
        fills: dict[int, list[Fill]] = defaultdict(list)
        filled = 0
        for box in planner.boxes(tensor, saved_tensor):
            target = narrowed(here, box.target_offsets, box.lengths)
            fills[box.number].append(Fill(box.source_offsets, box.lengths, target))
            filled += box.num_elements
        if filled != here.numel():
            holes.append(f"of {fqn} it contains only {filled} of the {here.numel()} elements that this rank needs")
        reads += [ItemRead(*places[number], saved_tensor.dtype, tuple(parts)) for number, parts in fills.items()]
    if holes:
        raise StateMismatch(directory, tuple(holes))
    return sorted(reads, key=lambda read: (read.file, read.item.file_offset))


class _Planner:
    """Calls torch once for all tensors with equal sharding: a state has hundreds of tensors, of about ten kinds."""

    def __init__(self) -> None:
        self._chunks: dict[Hashable, list[ChunkStorageMetadata]] = {}
        self._boxes: dict[Hashable, tuple[_Box, ...]] = {}

    def boxes(self, tensor: torch.Tensor, saved: _Saved) -> tuple[_Box, ...]:
        layout = _layout(tensor)
        kind = layout, tuple((offsets, item.sizes) for offsets, (_, item) in saved.slices.items())
        if kind not in self._boxes:
            if layout not in self._chunks:
                self._chunks[layout] = _chunks(tensor)
            self._boxes[kind] = _overlaps(self._chunks[layout], saved)
        return self._boxes[kind]


def _layout(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors of which this rank has equal boxes."""
    return (tensor.shape, tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else tensor.shape


def _chunks(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    if isinstance(tensor, DTensor):
        return tensor.__create_chunk_list__()  # type: ignore[no-untyped-call, no-any-return]
    return [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)]


def _overlaps(chunks: list[ChunkStorageMetadata], saved: _Saved) -> tuple[_Box, ...]:
    slices = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(item.sizes)) for offsets, (_, item) in saved.slices.items()
    ]
    known = TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), slices)
    boxes = []
    for read in create_read_items_for_chunk_list("", known, chunks):
        assert read.storage_index.index is not None
        lengths = tuple(read.lengths)
        offsets = tuple(read.storage_offsets), tuple(read.dest_offsets)
        boxes.append(_Box(read.storage_index.index, *offsets, lengths, prod(lengths)))
    return tuple(boxes)


def _collect(indexes: Sequence[ShardIndex], directory: str) -> dict[str, _Saved]:
    saved: dict[str, _Saved] = {}
    dtypes: dict[Hashable, torch.dtype] = {}
    for index in indexes:
        file = payload_name(index.rank)
        for item in index.items:
            known = saved.get(item.fqn)
            kind = item.dtype, item.sizes, item.nbytes
            dtype = dtypes.get(kind)
            if dtype is None:
                dtype = dtypes[kind] = dtype_of(item, index.rank, directory)
            if known is None:
                known = saved[item.fqn] = _Saved(dtype, item.shape, {})
            elif known.shape != item.shape or known.dtype != dtype:
                problem = f"records {item.fqn} as {dtype} {item.shape}, but a lower rank as {known.dtype} {known.shape}"
                raise DamagedCheckpoint(directory, index_name(index.rank), problem)
            known.slices.setdefault(item.offsets, (file, item))
    return saved


def dtype_of(item: IndexItem, rank: int, directory: str) -> torch.dtype:
    """DamagedCheckpoint if torch has no dtype of that name, or the slice does not have the bytes that it needs."""
    dtype = getattr(torch, item.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(directory, index_name(rank), f"gives {item.fqn} the unknown dtype {item.dtype!r}")
    if prod(item.sizes) * dtype.itemsize != item.nbytes:
        problem = f"gives {item.fqn} {item.nbytes} bytes for {item.dtype} of {item.sizes}"
        raise DamagedCheckpoint(directory, index_name(rank), problem)
    return dtype


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The box of a tensor that begins at `offsets`, as a view. Offsets of a scalar, which has no dims, are ignored."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=False)):
        if length < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def _refuse_mismatch(state: Mapping[str, torch.Tensor], saved: Mapping[str, _Saved], directory: str) -> None:
    problems = []
    for fqn, tensor in state.items():
        if tensor.device.type == "meta":
            raise ValueError(
                f"{fqn} is on the meta device, so it has no memory to load into: materialize the model first"
            )
        there = saved.get(fqn)
        if there is None:
            problems.append(f"it has no {fqn}")
        elif (there.dtype, there.shape) != (tensor.dtype, tensor.shape):
            here = f"{tensor.dtype} {tuple(tensor.shape)}"
            problems.append(f"{fqn} is {there.dtype} {there.shape} in it, {here} here")
    if problems:
        raise StateMismatch(directory, tuple(problems))
