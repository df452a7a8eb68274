"""Decides which saved parts a rank opens, so that it does not open those of all ranks to use two of them.

    1  open part 0; it also has the values that are not tensors
    2  of each tensor that is not covered: the slices that are known show the grid in which it was split, and so the
       slices that are lacking; the order of the ranks shows in which parts they probably are: open these
    3  a tensor of which no slice is known (of another pipeline stage): open parts in between
    4  repeat; after some rounds, open all that are left

A wrong guess costs one part that is opened in vain, never a wrong result: the load ends once every element is covered
by slices that were seen. So nothing needs to know the layout in which the parts were saved. Pure; one object per load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod

from shoal_workers.contract.optimizers import EMA

Numbers = tuple[int, ...]
Box = tuple[Numbers, Numbers]
"""Offsets and sizes, per dim."""

_MAX_ROUNDS = 10
_MAX_CELLS = 4096
"""Cells of one tensor's grid that are looked at in one round."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank needs of one tensor. A tensor of which it needs nothing must exist, too."""

    shape: Numbers
    boxes: tuple[Box, ...]
    """Disjoint."""


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
    return name if name.startswith("optim.") and name.endswith(f".{EMA}") else name.rpartition(".")[0]


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
        self._tensors = {
            name: _Tensor(tensor, sum(prod(sizes) for _, sizes in tensor.boxes)) for name, tensor in wanted.items()
        }
        self._uncovered = dict(self._tensors)
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
                    covered[key] = sum(_overlap(box, (offsets, sizes)) for box in tensor.wanted.boxes)
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
        """Yield the parts that probably have the slices that are lacking."""
        if not tensor.slices or not tensor.wanted.shape:
            return
        grid = _Grid.of(tensor, self._num_parts)
        if grid is None:
            return
        for cell in grid.cells(tensor.wanted.boxes):
            if grid.start(cell) not in tensor.slices:
                guess = next((part for part in grid.parts(cell) if self._is_free(part)), None)
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


@dataclass(frozen=True, slots=True)
class _Grid:
    """The slices into which a tensor was split, all of one size but the last ones; as far as it is known."""

    step: Numbers
    """Size of a slice, per dim."""
    counts: Numbers
    """Number of slices, per dim."""
    known: dict[Numbers, int]
    """The part with a cell's slice, by cell."""
    strides: tuple[Numbers, ...]
    """How far apart the parts of neighbouring cells are, per dim: the guesses, the most probable first."""

    @staticmethod
    def of(tensor: _Tensor, num_parts: int) -> _Grid | None:
        """Return None if the slices show no grid."""
        step = tuple(map(max, *(sizes for _, sizes in tensor.slices.values()), (0,) * len(tensor.wanted.shape)))
        if 0 in step:
            return None
        counts = tuple(-(-whole // step_size) for whole, step_size in zip(tensor.wanted.shape, step, strict=True))
        known = {
            tuple(offset // step_size for offset, step_size in zip(offsets, step, strict=True)): part
            for offsets, (part, _) in tensor.slices.items()
        }
        return _Grid(step, counts, known, tuple(_strides(counts, known, num_parts)))

    def cells(self, boxes: Iterable[Box]) -> Iterator[Numbers]:
        left = _MAX_CELLS
        for offsets, sizes in boxes:
            if 0 in sizes:
                continue
            ranges = (
                range(offset // step_size, (offset + size - 1) // step_size + 1)
                for offset, size, step_size in zip(offsets, sizes, self.step, strict=True)
            )
            for cell in product(*ranges):
                if not left:
                    return
                left -= 1
                yield cell

    def start(self, cell: Numbers) -> Numbers:
        return tuple(at * step_size for at, step_size in zip(cell, self.step, strict=True))

    def parts(self, cell: Numbers) -> Iterator[int]:
        """Yield the parts in which the slice of this cell may be, counted from the known cell that is nearest."""
        nearest = min(self.known, key=lambda other: sum(abs(a - b) for a, b in zip(cell, other, strict=True)))
        for strides in self.strides:
            away = (stride * (a - b) for stride, a, b in zip(strides, cell, nearest, strict=True))
            yield self.known[nearest] + sum(away)


def _strides(counts: Numbers, known: Mapping[Numbers, int], num_parts: int) -> Iterator[Numbers]:
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


def _overlap(box: Box, other: Box) -> int:
    """Elements in both boxes."""
    overlap = 1
    for a, size_a, b, size_b in zip(*box, *other, strict=True):
        length = min(a + size_a, b + size_b) - max(a, b)
        if length <= 0:
            return 0
        overlap *= length
    return overlap
