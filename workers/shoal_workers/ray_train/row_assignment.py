"""Which rank reads which rows of a dataset, and which rows were read when a checkpoint was made. Pure.

    rows        0 .. 7 | 8 .. 15 | 16 .. 23 | ...      chunks of one batch, in the order of the dataset
    2 ranks     rank 0 | rank 1  | rank 0   | ...      a round is one chunk for each rank

Ranks go in step, so after n batches of each the rows that were read are the first n rounds: a beginning of the
dataset, which can be assigned to any other number of ranks from there. If some are ahead, the rows that they have read
beyond it are listed. The last round is shorter and equal for all; as in Ray Train, rows that cannot be split equally
are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Ranges = list[tuple[int, int]]
"""Half-open ranges of row numbers: ascending, and neither empty nor adjacent."""


def union(*many: Ranges) -> Ranges:
    ranges: Ranges = []
    for first, last in sorted((first, last) for ranges in many for first, last in ranges if first < last):
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], last))
        else:
            ranges.append((first, last))
    return ranges


def number_of(ranges: Ranges) -> int:
    return sum(last - first for first, last in ranges)


def without(first: int, last: int, taken: Ranges) -> Ranges:
    """The parts of these rows that are not taken."""
    ranges: Ranges = []
    for begin, end in taken:
        if end <= first or begin >= last:
            continue
        if first < begin:
            ranges.append((first, begin))
        first = max(first, end)
    return [*ranges, (first, last)] if first < last else ranges


def among_left(ranges: Ranges, taken: Ranges) -> Ranges:
    """Row numbers in the dataset of ranges that count only the rows that are not taken."""
    left_ranges: Ranges = []
    position, counted = 0, 0  # the row of the dataset that is the `counted`-th of those left
    gaps = [(begin, end) for begin, end in taken]
    for first, last in ranges:
        while first < last:
            while gaps and gaps[0][0] <= position:
                position = max(position, gaps.pop(0)[1])
            free = gaps[0][0] - position if gaps else last - counted
            if counted + free <= first:  # whole stretch before the range
                counted, position = counted + free, position + free
                continue
            begin = position + (first - counted)
            size = min(last - first, counted + free - first)
            left_ranges.append((begin, begin + size))
            first += size
    return union(left_ranges)


@dataclass(frozen=True, slots=True)
class Reading:
    """How far one rank has read in a pass over a dataset."""

    rows: int
    """Number of rows that its program has got."""
    chunk: int
    tail: tuple[int, int] | None = None
    """The last round, once it is known: the number of rounds before it, and the rows of each rank in it."""


def rows_read(taken: Ranges, readings: Sequence[Reading]) -> Ranges:
    """The rows that were read in a pass, of all ranks together.

    Args:
        taken: what was read before the pass was resumed.
        readings: by rank.
    """
    world_size, chunk = len(readings), readings[0].chunk
    tail = next((reading.tail for reading in readings if reading.tail is not None), None)
    ranges: Ranges = []
    common = min(reading.rows // chunk for reading in readings)
    if tail is not None:
        common = min(common, tail[0])
    for rank, reading in enumerate(readings):
        left, number = reading.rows - common * chunk, common
        while left > 0:
            if tail is not None and number >= tail[0]:
                begin, size = tail[0] * world_size * chunk + rank * tail[1], min(left, tail[1])
                left = 0
            else:
                begin, size = (number * world_size + rank) * chunk, min(left, chunk)
                left -= size
            ranges.append((begin, begin + size))
            number += 1
    return union(taken, among_left(union([(0, common * world_size * chunk)], ranges), taken))


def positions_of(said: list[dict[str, tuple[Ranges, Reading | None] | None]]) -> dict[str, Ranges]:
    """The rows of each dataset that were read in the pass that a resumed group goes on with. A dataset between two
    passes, or one whose position is not kept, is left out: its next pass begins at its beginning.

    Args:
        said: by rank, for each dataset the rows that were read before the pass, and how far the rank is in it.
    """
    ranges_by_path: dict[str, Ranges] = {}
    for key in said[0] if said else ():
        values = [answer.get(key) for answer in said]
        open_ones = [value for value in values if value is not None]
        if not open_ones:
            continue
        taken, _ = open_ones[0]
        readings = [value[1] for value in open_ones if value[1] is not None]
        if not readings:
            ranges_by_path[key] = taken
            continue
        chunk, most = readings[0].chunk, max(reading.rows for reading in readings)
        tail = next((reading.tail for reading in readings if reading.tail is not None), None)
        # A rank that is through the pass already has read as much as the one that is ahead.
        of_ranks = [
            Reading(most, chunk, tail) if value is None else value[1] or Reading(0, chunk, tail) for value in values
        ]
        ranges_by_path[key] = rows_read(taken, of_ranks)
    return ranges_by_path


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one block: `block` is what the caller knows it by."""

    block: Any
    first: int
    last: int


class RowAssigner:
    """Assigns the blocks of one pass, which come in the order of the dataset.

    Args:
        taken: rows that are left out, because they were read before.
    """

    def __init__(self, world_size: int, chunk: int, taken: Ranges) -> None:
        self._world_size = world_size
        self._chunk = chunk
        self._taken = taken
        self._row = 0
        """Number of the first row of the next block."""
        self._left: deque[Piece] = deque()
        self._num_left = 0

    def add(self, block: Any, num_rows: int) -> list[list[list[Piece]]]:
        """The rounds that are complete with this block: for each rank, what it reads."""
        for first, last in without(self._row, self._row + num_rows, self._taken):
            self._left.append(Piece(block, first - self._row, last - self._row))
            self._num_left += last - first
        self._row += num_rows
        rounds = []
        while self._num_left >= self._chunk * self._world_size:
            rounds.append([self._take(self._chunk) for _ in range(self._world_size)])
        return rounds

    def end(self) -> tuple[int, list[list[Piece]]]:
        """The rows of each rank in the last round, and that round."""
        width = self._num_left // self._world_size
        return width, [self._take(width) for _ in range(self._world_size)] if width else []

    def _take(self, rows: int) -> list[Piece]:
        ranges = []
        while rows:
            piece = self._left.popleft()
            size = min(rows, piece.last - piece.first)
            ranges.append(Piece(piece.block, piece.first, piece.first + size))
            if size < piece.last - piece.first:
                self._left.appendleft(Piece(piece.block, piece.first + size, piece.last))
            rows -= size
            self._num_left -= size
        return ranges
