"""Plans which saved slices fill which parts of the state, from any layout into any layout.

A plan intersects the boxes that a rank needs with the slices in the ranks' indexes. A slice that several ranks wrote is
read from the lowest rank of those whose index was read. A state that the saved slices do not cover is refused. Tensors
that the caller names as optional may be absent, a whole group at a time: a parameter has no optimizer state before its
first gradient. Called by `reader` and by the snapshot store.

`NeededParts` decides which saved parts a rank opens, so that it does not open those of all ranks to use two of them:

    1  open part 0; it also has the values that are not tensors
    2  of each tensor that is not covered: the slices that are known show the grid in which it was split, and so the
       slices that are lacking; the order of the ranks shows in which parts they probably are: open these
    3  a tensor of which no slice is known (of another pipeline stage): open parts in between
    4  repeat; after some rounds, open all that are left

A wrong guess costs one part that is opened in vain, never a wrong result: the load ends once every element is covered
by slices that were seen. So nothing needs to know the layout in which the parts were saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise, product
from math import prod
from operator import add, floordiv, mul, sub
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.errors import DamagedCheckpoint, StateMismatch
from shoal_workers.checkpoint.index import IndexItem, ShardIndex, index_name, payload_name
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.optimizers import ADDED_STATE

Numbers = tuple[int, ...]
Box = tuple[Numbers, Numbers]
"""Offsets and sizes, per dim."""


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
            chunks = chunks_of(tensor) if is_here else []
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
    reads: list[ItemRead] = []
    holes: list[str] = []
    overlaps: dict[Hashable, list[_Overlap]] = {}
    for fqn, wanted in _wanted(state).items():
        slices, here = saved[fqn].slices, local_tensor(state[fqn])
        kind = wanted, tuple((offsets, item.sizes) for offsets, (_, item) in slices.items())
        if kind not in overlaps:  # a state has hundreds of tensors, of about ten kinds
            overlaps[kind] = list(_find_overlaps(*kind))
        fills: dict[Numbers, list[Fill]] = defaultdict(list)
        for overlap in overlaps[kind]:
            target = narrowed(here, overlap.target_offsets, overlap.lengths)
            fills[overlap.slice].append(Fill(overlap.source_offsets, overlap.lengths, target))
        filled = sum(overlap.num_elements for overlap in overlaps[kind])
        if filled != wanted.num_elements:
            holes.append(
                f"of {fqn} it contains only {filled} of the {wanted.num_elements} elements that this rank needs"
            )
        reads += [ItemRead(*slices[offsets], saved[fqn].dtype, tuple(parts)) for offsets, parts in fills.items()]
    if holes:
        raise StateMismatch(directory, tuple(holes))
    return sorted(reads, key=lambda read: (read.file, read.item.file_offset))


@dataclass(frozen=True, slots=True)
class _Overlap:
    """What a saved slice has of a box that this rank needs."""

    slice: Numbers
    """Offsets of the slice."""
    source_offsets: Numbers
    """In the slice."""
    target_offsets: Numbers
    """In the box."""
    lengths: Numbers
    num_elements: int


def _find_overlaps(wanted: Wanted, slices: Iterable[Box]) -> Iterator[_Overlap]:
    for offsets, sizes in slices:
        for box in wanted.boxes:
            start, lengths = intersect(box, (offsets, sizes))
            num_elements = prod(lengths)
            if num_elements:
                yield _Overlap(offsets, _minus(start, offsets), _minus(start, box[0]), lengths, num_elements)


def intersect(box: Box, other: Box) -> Box:
    """Return the part that both boxes have; 0 in its sizes if there is none."""
    start = tuple(map(max, box[0], other[0]))
    ends = (tuple(map(add, *each)) for each in (box, other))
    return start, tuple(max(0, end - begin) for begin, end in zip(start, map(min, *ends), strict=True))


def _layout(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors of which this rank has equal boxes."""
    return (tensor.shape, tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else tensor.shape


def chunks_of(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    if isinstance(tensor, DTensor):
        return tensor.__create_chunk_list__()  # type: ignore[no-untyped-call, no-any-return]
    return [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)]


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
    """Return the box of a tensor that begins at `offsets`, as a view. Offsets of a scalar, which has no dims, are
    ignored."""
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


_MAX_ROUNDS = 10
_MAX_CELLS = 4096
"""Cells of one tensor's grid that are looked at in one round."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank needs of one tensor. A tensor of which it needs nothing must exist, too."""

    shape: Numbers
    boxes: tuple[Box, ...]
    """Disjoint."""

    @property
    def num_elements(self) -> int:
        return sum(prod(sizes) for _, sizes in self.boxes)


@dataclass(frozen=True, slots=True)
class Follower:
    """What is known of a tensor that the source may lack, together with all others of its group."""

    group: str
    """See `group_of`."""
    owner: str | None
    """Whatever part has a slice of this tensor has one of the follower's as well, unless the source lacks its group.
    None if there is no such tensor."""


@dataclass(slots=True)
class _Tensor:
    """What is known of a wanted tensor."""

    wanted: Wanted
    lacking: int
    """Elements that no slice covers that was seen."""
    slices: dict[Numbers, tuple[int, Numbers]] = field(default_factory=dict)
    """The first part in which a slice was seen, and the slice's sizes; by the slice's offsets."""

    @property
    def is_covered(self) -> bool:
        return self.lacking <= 0 and bool(self.slices)


def group_of(name: str) -> str:
    """A source has all tensors of a group or none: the state of a parameter, without the average of its values, which
    is a group of its own."""
    return name if name.startswith("optim.") and name.rpartition(".")[2] in ADDED_STATE else name.rpartition(".")[0]


class NeededParts:
    """Alternate `take` and `opened` until `take` returns nothing."""

    def __init__(
        self, wanted: Mapping[str, Wanted], num_parts: int, followers: Mapping[str, Follower] | None = None
    ) -> None:
        """`followers`: by name, those of the wanted tensors that the source may lack."""
        self._groups: dict[str, list[str]] = {}
        """Names of the followers, by group."""
        self._owned: dict[str, set[str]] = {}
        """Groups of the followers, by owner."""
        for name, follower in (followers or {}).items():
            self._groups.setdefault(follower.group, []).append(name)
            if follower.owner is not None:
                self._owned.setdefault(follower.owner, set()).add(follower.group)
        self._uncovered = {name: _Tensor(tensor, tensor.num_elements) for name, tensor in wanted.items()}
        self._num_parts = num_parts
        self._taken: set[int] = set()
        self._num_rounds = 0
        self._probes = _spread(num_parts)

    def take(self) -> list[int]:
        """Parts to open next, ascending; none: all is covered, or every part was opened."""
        self._uncovered = {name: tensor for name, tensor in self._uncovered.items() if not tensor.is_covered}
        self._num_rounds += 1
        if not self._taken:
            chosen = {0}
        elif not self._uncovered:
            chosen = set()
        elif self._num_rounds > _MAX_ROUNDS:
            chosen = set(range(self._num_parts)) - self._taken
        else:
            alike = {(tensor.wanted, tuple(tensor.slices.items())): tensor for tensor in self._uncovered.values()}
            chosen = {part for tensor in alike.values() for part in self._guesses(tensor)} or self._probe()
        self._taken |= chosen
        return sorted(chosen)

    def opened(self, part: int, slices: Iterable[tuple[str, Numbers, Numbers]]) -> None:
        """`slices`: name of the tensor, offsets and sizes of each slice in the part."""
        covered: dict[tuple[Wanted, Box], int] = {}
        expected: set[str] = set()
        seen: set[str] = set()
        for name, offsets, sizes in slices:
            if 0 not in sizes:
                expected |= self._owned.get(name, set())
            if self._groups:
                seen.add(group_of(name))
            tensor = self._uncovered.get(name)
            if tensor is not None and offsets not in tensor.slices and len(offsets) == len(tensor.wanted.shape):
                tensor.slices[offsets] = part, sizes
                key = tensor.wanted, (offsets, sizes)
                if key not in covered:  # a state has hundreds of tensors, of about ten kinds
                    covered[key] = sum(prod(intersect(box, (offsets, sizes))[1]) for box in tensor.wanted.boxes)
                tensor.lacking -= covered[key]
        for group in expected - seen:
            self._lacks(group)

    def _lacks(self, group: str) -> None:
        """The source has no tensor of this group, as far as it was seen: no other part is opened to look for one."""
        for name in self._groups[group]:
            tensor = self._uncovered.get(name)
            if tensor is not None and not tensor.slices:
                del self._uncovered[name]

    def _guesses(self, tensor: _Tensor) -> Iterator[int]:
        """Yield the parts that probably have the slices that are lacking.

        A tensor was split into slices of one size, but for the last ones: cells of a grid. Counted from the nearest
        cell whose part is known, the parts of neighbouring cells lie equally far apart along each dim.
        """
        shape = tensor.wanted.shape
        step = tuple(max((sizes[dim] for _, sizes in tensor.slices.values()), default=0) for dim in range(len(shape)))
        if not shape or 0 in step:
            return
        known = {tuple(map(floordiv, offsets, step)): part for offsets, (part, _) in tensor.slices.items()}
        counts = tuple(-(-whole // step_size) for whole, step_size in zip(shape, step, strict=True))
        strides = tuple(_strides(counts, known, self._num_parts))
        for cell in islice(_cells(tensor.wanted.boxes, step), _MAX_CELLS):
            if cell not in known:
                nearest = min(known, key=partial(_distance, cell))
                apart = _minus(cell, nearest)
                guesses = (known[nearest] + sum(map(mul, stride, apart)) for stride in strides)
                guess = next((part for part in guesses if self._is_free(part)), None)
                if guess is not None:
                    yield guess

    def _is_free(self, part: int) -> bool:
        return 0 <= part < self._num_parts and part not in self._taken

    def _probe(self) -> set[int]:
        """Return some parts far from those that were opened, more of them in each round."""
        dims: set[int] = set()
        for part in self._probes:
            if part not in self._taken:
                dims.add(part)
                if len(dims) >= 1 << max(self._num_rounds - 2, 0):
                    break
        return dims


def _cells(boxes: Iterable[Box], step: Numbers) -> Iterator[Numbers]:
    """Yield the cells of the grid in which the boxes are."""
    for offsets, sizes in boxes:
        if 0 not in sizes:
            spans = zip(offsets, sizes, step, strict=True)
            yield from product(*(range(at // width, (at + size - 1) // width + 1) for at, size, width in spans))


def _minus(place: Numbers, other: Numbers) -> Numbers:
    return tuple(map(sub, place, other))


def _distance(cell: Numbers, other: Numbers) -> int:
    return sum(map(abs, _minus(cell, other)))


def _strides(counts: Numbers, known: Mapping[Numbers, int], num_parts: int) -> Iterator[Numbers]:
    """Yield how far apart the parts of neighbouring cells are, per dim: guesses, the most probable first."""
    split = [dim for dim, count in enumerate(counts) if count > 1]
    learned = {dim: stride for dim in split if (stride := _learned(dim, known))}
    guesses: list[dict[int, int]] = []
    if len(split) == 1:
        # neighbours in the same axis; or another axis, over which it was not split, lies in between
        guesses = [{split[0]: 1}, {split[0]: max(num_parts // counts[split[0]], 1)}]
    elif split:
        # the axis of fewer ranks is the inner one more often than not
        for order in (sorted(split, key=lambda dim: counts[dim]), sorted(split, key=lambda dim: -counts[dim])):
            strides, inner = {}, 1
            for dim in order:
                strides[dim] = inner
                inner *= counts[dim]
            guesses.append(strides)
    for guess in guesses:
        yield tuple((guess | learned).get(dim, 0) for dim in range(len(counts)))


def _learned(dim: int, known: Mapping[Numbers, int]) -> int:
    """Return how far apart the parts of neighbours along this dim are, from two known cells that differ in it alone; 0
    if there are none."""
    cells = sorted(known)
    for first, second in pairwise(cells):
        apart = second[dim] - first[dim]
        if apart > 0 and first[:dim] == second[:dim] and first[dim + 1 :] == second[dim + 1 :]:
            stride, rest = divmod(known[second] - known[first], apart)
            if stride > 0 and not rest:
                return stride
    return 0


def _spread(count: int) -> list[int]:
    """0 to count - 1, each as far from the earlier ones as possible: the middle, the quarters, the eighths ..."""
    order, step = dict.fromkeys((0,)), count
    while step > 1:
        step = -(-step // 2)
        order |= dict.fromkeys(range(step, count, step))
    return list(order)
