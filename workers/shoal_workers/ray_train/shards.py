"""Shards of Ray Data datasets, with their position: who reads which rows, and where a resumed run goes on.

    Coordinator   an actor beside rank 0: runs the dataset once a pass, in order, and assigns references to its blocks
    Shard         of one rank: fetches its rows, and counts those that the program has got

The blocks do not pass through the coordinator. A dataset that is not split is run once for each rank, as in Ray Train.
The coordinator belongs to the script's own Ray job and ends with it.

    rows        0 .. 7 | 8 .. 15 | 16 .. 23 | ...      chunks of one batch, in the order of the dataset
    2 ranks     rank 0 | rank 1  | rank 0   | ...      a round is one chunk for each rank

Ranks go in step, so after n batches of each the rows that were read are the first n rounds: a beginning of the
dataset, which can be assigned to any other number of ranks from there. If some are ahead, the rows that they have read
beyond it are listed. The last round is shorter and equal for all; as in Ray Train, rows that cannot be split equally
are left out.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from shoal_workers.ray_internals import bundles_of, shard_iterator
from shoal_workers.ray_train.group import Group

NAMESPACE = "shoal-ray-train"
_ROWS_WITHOUT_BATCH = 1024
"""Rows that a rank reads in one go if its program reads rows, or blocks as they come."""
_ROUNDS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What every rank knows of a dataset."""

    name: str
    actor: str
    """Name of its coordinator."""
    is_split: bool
    taken: Ranges
    """Rows that were read before this group, in the pass that goes on."""


@dataclass(frozen=True, slots=True)
class AssignedRows:
    """Answer of the coordinator to one rank."""

    rounds: list[list[Piece]]
    """What the rank reads in the next rounds. The block of a piece is a reference."""
    tail: tuple[int, int] | None
    has_ended: bool


class _Pass:
    """One run over the dataset. `lock` is held by the caller of every method."""

    def __init__(self, bundles: Iterator[tuple[Any, int]], assigner: RowAssigner, num_ranks: int) -> None:
        self.lock = threading.Lock()
        self._bundles = bundles
        self._dealer = assigner
        self._rounds: list[list[list[Piece]]] = []
        self._released = 0
        """Rounds that every rank has, so their blocks may go."""
        self._has = [0] * num_ranks
        """By rank: the number of rounds that it has received."""
        self.tail: tuple[int, int] | None = None
        self.num_ended = 0

    def assigned(self, rank: int, first: int) -> AssignedRows:
        while self.tail is None and len(self._rounds) <= first:
            block = next(self._bundles, None)
            if block is not None:
                self._rounds += self._dealer.add(*block)
                continue
            width, last = self._dealer.end()
            self.tail = (len(self._rounds), width)
            self._rounds += [last] if last else []
        self._has[rank] = first
        while self._released < min(self._has):
            self._rounds[self._released] = []
            self._released += 1
        ready = [shard_round[rank] for shard_round in self._rounds[first : first + _ROUNDS_AT_ONCE]]
        return AssignedRows(ready, self.tail, self.tail is not None and first + len(ready) >= len(self._rounds))


class Coordinator:
    """The actor of one dataset. Its calls come from as many threads as there are ranks.

    Args:
        taken: rows that are left out of the first pass.
    """

    def __init__(self, dataset: Any, world_size: int, is_split: bool, taken: Ranges) -> None:
        self._dataset = dataset() if callable(dataset) else dataset
        self._world_size = world_size
        self._is_split = is_split
        self._taken = taken
        self._passes: dict[tuple[int, int], _Pass] = {}
        """By number and, if the dataset is not split, rank."""
        self._lock = threading.Lock()

    def schema(self) -> Any:
        return self._dataset.schema()

    def assign(self, number: int, rank: int, chunk: int, first_round: int) -> AssignedRows:
        """What `rank` reads from that round on, in that pass."""
        data_pass = self._pass(number, rank, chunk)
        with data_pass.lock:
            return data_pass.assigned(rank if self._is_split else 0, first_round)

    def end(self, number: int, rank: int) -> None:
        """That rank has ended the pass, whether or not it has read all of it."""
        key = (number, 0 if self._is_split else rank)
        with self._lock:
            data_pass = self._passes.get(key)
            if data_pass is not None:
                data_pass.num_ended += 1
                if data_pass.num_ended == (self._world_size if self._is_split else 1):
                    del self._passes[key]

    def _pass(self, number: int, rank: int, chunk: int) -> _Pass:
        key = (number, 0 if self._is_split else rank)
        with self._lock:
            if key not in self._passes:
                num_ranks = self._world_size if self._is_split else 1
                assigner = RowAssigner(num_ranks, chunk, self._taken if number == 0 else [])
                self._passes[key] = _Pass(bundles_of(self._dataset), assigner, num_ranks)
            return self._passes[key]


def start_coordinator(plan: ShardPlan, dataset: Any, world_size: int) -> Any:
    """Rank 0: does not wait for the actor. Returns its handle, with which the actor lives."""
    node = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(Coordinator)
        .options(
            name=plan.actor,
            namespace=NAMESPACE,
            num_cpus=0,
            max_concurrency=world_size + 2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(dataset, world_size, plan.is_split, plan.taken)
    )


class Shard:
    """One rank's part of one dataset. `iterator` is what `ray.train.get_dataset_shard` returns."""

    def __init__(self, plan: ShardPlan, group: Group) -> None:
        self._plan = plan
        self._rank = group.rank
        self._actor: Any = None
        self._number = -1
        """Number of the pass that was begun last."""
        self._is_open = False
        self._chunk = 0
        self._rows = 0
        self._sizes: list[int] = []
        """Rows of each piece that was fetched, in their order, if the program reads pieces."""
        self._tail: tuple[int, int] | None = None
        self._is_shuffled = False
        self.iterator = shard_iterator(self)

    def reading(self) -> tuple[Ranges, Reading | None] | None:
        """Return the rows that were read before the pass, and how far this rank is in it; None if no pass is to be gone
        on with."""
        if not self._plan.is_split:
            return None
        if self._number < 0:
            return (self._plan.taken, None) if self._plan.taken else None
        if not self._is_open or self._is_shuffled:
            return None
        rows = self._rows
        if self._tail is not None:
            rows = min(rows, self._tail[0] * self._chunk + self._tail[1])
        return self._plan.taken if self._number == 0 else [], Reading(rows, self._chunk, self._tail)

    def begin(self, batch_size: int | None, *, is_shuffled: bool) -> None:
        """The program begins a pass. `is_shuffled`: by a buffer of this rank, so rows do not come in their order."""
        self._handle()  # on this thread: Ray is initialized on the main one
        self._number += 1
        self._is_open, self._is_shuffled = True, is_shuffled
        self._chunk = batch_size or _ROWS_WITHOUT_BATCH
        self._rows, self._sizes, self._tail = 0, [], None

    def took_batch(self, number: int, batch_size: int | None) -> None:
        """The program gets its `number`-th batch, from 0."""
        self._rows += batch_size if batch_size is not None else self._sizes[number]

    def took_row(self) -> None:
        self._rows += 1

    def end(self) -> None:
        """The pass is over: everything was read, or the program reads no further."""
        self._is_open = False
        self._handle().end.remote(self._number, self._rank)

    def blocks(self) -> Iterator[tuple[Any, int, int]]:
        """References to the blocks of the present pass, each with the rows of it that are this rank's. Another thread
        reads ahead."""
        number, done, has_ended = self._number, 0, False
        while not has_ended:
            assigned = ray.get(self._handle().assign.remote(number, self._rank, self._chunk, done))
            self._tail, has_ended = assigned.tail, assigned.has_ended
            done += len(assigned.rounds)
            for pieces in assigned.rounds:
                for piece in pieces:
                    self._sizes.append(piece.last - piece.first)
                    yield piece.block, piece.first, piece.last

    def schema(self) -> Any:
        return ray.get(self._handle().schema.remote())

    def _handle(self) -> Any:
        if self._actor is None:
            if not ray.is_initialized():
                ray.init(log_to_driver=False)
            self._actor = ray.get_actor(self._plan.actor, namespace=NAMESPACE)
        return self._actor


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
    """Return the parts of these rows that are not taken."""
    ranges: Ranges = []
    for begin, end in taken:
        if end <= first or begin >= last:
            continue
        if first < begin:
            ranges.append((first, begin))
        first = max(first, end)
    return [*ranges, (first, last)] if first < last else ranges


def among_left(ranges: Ranges, taken: Ranges) -> Ranges:
    """Return the row numbers in the dataset of ranges that count only the rows that are not taken."""
    left_ranges: Ranges = []
    num_left = 0  # rows that are not taken, before this stretch of them
    past_all = number_of(taken) + max((last for _, last in ranges), default=0)
    for begin, end in without(0, past_all, taken):
        for first, last in ranges:
            left_ranges.append((begin + max(first - num_left, 0), min(begin + last - num_left, end)))
        num_left += end - begin
    return union(left_ranges)  # without those that lie in other stretches: they are empty


@dataclass(frozen=True, slots=True)
class Reading:
    """How far one rank has read in a pass over a dataset."""

    rows: int
    """Number of rows that its program has got."""
    chunk: int
    tail: tuple[int, int] | None = None
    """The last round, once it is known: the number of rounds before it, and the rows of each rank in it."""


def rows_read(taken: Ranges, readings: Sequence[Reading]) -> Ranges:
    """Return the rows that were read in a pass, of all ranks together.

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
    """Return the rows of each dataset that were read in the pass that a resumed group goes on with. A dataset between
    two passes, or one whose position is not kept, is left out: its next pass begins at its beginning.

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
        """Return the rounds that are complete with this block: for each rank, what it reads."""
        for first, last in without(self._row, self._row + num_rows, self._taken):
            self._left.append(Piece(block, first - self._row, last - self._row))
            self._num_left += last - first
        self._row += num_rows
        rounds = []
        while self._num_left >= self._chunk * self._world_size:
            rounds.append([self._take(self._chunk) for _ in range(self._world_size)])
        return rounds

    def end(self) -> tuple[int, list[list[Piece]]]:
        """Return the rows of each rank in the last round, and that round."""
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
