"""Shards of Ray Data datasets, with their position: who reads which rows, and where a resumed run goes on.

    Coordinator   an actor beside rank 0: runs the dataset once a pass, in order, and assigns references to its blocks
    Shard         of one rank: fetches its rows, and counts those that the program has got

The blocks do not pass through the coordinator. A dataset that is not split is run once for each rank, as in Ray Train.
The coordinator belongs to the script's own Ray job and ends with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from shoal_workers.ray_internals import bundles_of, shard_iterator
from shoal_workers.ray_train.group import Group
from shoal_workers.ray_train.row_assignment import Piece, Ranges, Reading, RowAssigner

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
        """The rows that were read before the pass, and how far this rank is in it; None if no pass is to be gone on
        with."""
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
