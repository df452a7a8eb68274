"""Samples of a map-style data set, in micro-batches: read here, or ahead of time by worker processes.

    order     which samples a micro-batch of a step has: a pure function of the step, so no position is kept
    fetch     reads and collates them, with random numbers that depend on the job's seed and the micro-batch only
    workers   a DataLoader over the requests of this rank, step after step

A user's own DataLoader over such a data set is taken apart: its sampler gives the order, once for each epoch; its data
set, its collate function and its worker processes do the rest. A rank asks for its own batches only, so going on in the
middle of an epoch reads nothing that was read before. Called by `Run` through data.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.utils.data import DataLoader
from torch.utils.data import sampler as torch_samplers

from shoal_workers.contract.batch_partition import MicroBatch, randomness_seed, sample_positions
from shoal_workers.engine.process.data_processes import CONTEXT, DataProcesses
from shoal_workers.engine.randomness import generator_states, seed_everything, set_generator_states
from shoal_workers.engine.sample_order import training_order

_PREFETCH_FACTOR = 2
_CHECK_S = 0.25
"""A rank that waits for data looks this often whether its group is over."""
_TIMED_OUT = "DataLoader timed out"
_SEEDED = 0x5A3D
"""Sets the random numbers of reading apart from those of training."""


@dataclass(frozen=True, slots=True)
class ShuffledOrder:
    """Shoal's own order, in which each epoch is another permutation, or that of the data set."""

    data: Any
    global_size: int
    micro_size: int
    seed: int

    def indices(self, step: int, micro_batch: int) -> Sequence[int]:
        """The samples of a micro-batch. `step`: completed steps before it."""
        positions = sample_positions(step, micro_batch, global_size=self.global_size, micro_size=self.micro_size)
        return training_order(self.data, positions, seed=self.seed)


class LoaderOrder:
    """That of a DataLoader's own sampler: the micro-batches of the run are its batches, epoch after epoch.

    Before each epoch the sampler gets `set_epoch(epoch)`, if it has that, and all generators are seeded with the epoch:
    its own, and the global ones. So the order of an epoch does not depend on what was drawn before.

    Raises:
        ValueError: the sampler gives another order of an epoch later, or no batch.
    """

    def __init__(self, loader: DataLoader[Any], num_micro_batches: int, seed: int) -> None:
        self._batches: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        self._is_batched = loader.batch_sampler is not None
        self._own = [
            source for source in (self._batches, getattr(self._batches, "sampler", None)) if source is not None
        ]
        self._generators = [
            generator
            for generator in (loader.generator, *(getattr(reader, "generator", None) for reader in self._own))
            if generator is not None
        ]
        self._num_micro_batches = num_micro_batches
        self._seed = seed
        self._epochs: dict[int, list[Any]] = {}
        self._first: list[Any] = []
        """The order of the first epoch; empty if the sampler is known to repeat it."""
        self._length = len(self._epoch(0))
        known = all(
            type(reader).__module__.startswith((torch_samplers.__name__, "torch.", "torchdata."))
            for reader in self._own
        )
        if not known:
            self._first = self._epoch(0)
        self._refuse_another_order("each time that it is iterated over")

    def indices(self, step: int, micro_batch: int) -> Sequence[Any]:
        epoch, at = divmod(step * self._num_micro_batches + micro_batch, self._length)
        batch = self._epoch(epoch)[at]
        return batch if self._is_batched else [batch]

    def batches(self, epoch: int) -> list[Sequence[Any]]:
        """The samples of each batch of an epoch."""
        return [batch if self._is_batched else [batch] for batch in self._epoch(epoch)]

    def _epoch(self, number: int) -> list[Any]:
        if number not in self._epochs:
            for old in [known for known in self._epochs if known < number - 1]:
                del self._epochs[old]
            if self._epochs:
                self._refuse_another_order("of its first epoch once samples were computed")
            self._epochs[number] = self._drawn(number)
            if not self._epochs[number]:
                raise ValueError(
                    "run.batches(): the loader has no batch. It has fewer samples than batch_size, with drop_last=True?"
                )
            if number and len(self._epochs[number]) != self._length:
                raise ValueError(
                    f"run.batches(): epoch {number} of the loader has {len(self._epochs[number])} batches, and the "
                    f"first one had {self._length}. A sampler has to give equally many batches in each epoch."
                )
        return self._epochs[number]

    def _refuse_another_order(self, when: str) -> None:
        if self._first and self._drawn(0) != self._first:
            raise ValueError(
                f"run.batches(): {type(self._own[-1]).__name__} gives another order {when}, so the samples of a step "
                "would not be the same on all ranks, nor known after a lost worker. Give it set_epoch(epoch), and let "
                "the order depend on that; or draw from torch, numpy or random without a generator of its own."
            )

    def _drawn(self, epoch: int) -> list[Any]:
        seed = randomness_seed(self._seed ^ _SEEDED, epoch, 0)
        for reader in self._own:
            if callable(set_epoch := getattr(reader, "set_epoch", None)):
                set_epoch(epoch)
        with torch.random.fork_rng(devices=[]):
            seed_everything(seed)
            for generator in self._generators:
                generator.manual_seed(seed)
            return list(self._batches)


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """That of one epoch of `run.epochs`, which ends with the data: its last step may have fewer micro-batches."""

    first_step: int
    """Completed steps before it."""
    steps: Sequence[Sequence[Sequence[Any]]]
    """The samples of each micro-batch, by step."""

    @property
    def end(self) -> int:
        return self.first_step + len(self.steps)

    def indices(self, step: int, micro_batch: int) -> Sequence[Any]:
        """The samples of a micro-batch; if the step does not have it, those of its first one."""
        pieces = self.steps[step - self.first_step]
        return pieces[micro_batch] if micro_batch < len(pieces) else pieces[0]

    def weighted(self, micro_batches: Sequence[MicroBatch], step: int) -> list[MicroBatch]:
        """The same, with weight 0 for those that the step does not have."""
        num = len(self.steps[step - self.first_step])
        return [micro if micro.index < num else replace(micro, weight=0.0) for micro in micro_batches]

    def share(self, step: int, micro_batch: int) -> float:
        """The micro-batch's fraction of the samples of its step: 1.0 if it has all of them."""
        return len(self.indices(step, micro_batch)) / self.num_samples(step)

    def num_samples(self, step: int) -> int:
        return sum(map(len, self.steps[step - self.first_step]))


Order = ShuffledOrder | LoaderOrder | EpochOrder
"""Which samples a micro-batch has."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One micro-batch of this rank."""

    step: int
    number: int
    """Among the micro-batches of this rank in the step."""
    indices: Sequence[Any]
    seed: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Reads a micro-batch: `fetch[request]`. In a worker process, or on the training thread."""

    dataset: Any
    collate: Callable[[Any], Any]
    is_batched: bool = True
    """False: one index names a whole batch."""

    def __getitem__(self, request: _Request) -> Any:
        seed_everything(request.seed)
        if not self.is_batched:
            return self.collate(self.dataset[request.indices[0]])
        if callable(several := getattr(self.dataset, "__getitems__", None)):
            return self.collate(several(list(request.indices)))
        return self.collate([self.dataset[index] for index in request.indices])


@dataclass(frozen=True, slots=True)
class Workers:
    """How many processes read ahead, and further arguments of their DataLoader."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    worker_init_fn: Callable[[int], None] | None = None
    context: Any = None
    pin_memory: bool = False


class Samples:
    """The micro-batches of this rank. Training thread only."""

    def __init__(
        self,
        fetch: Fetch,
        order: Order,
        own: Sequence[MicroBatch],
        num_micro_batches: int,
        *,
        workers: Workers,
        seed: int,
        check: Callable[[], None],
        processes: DataProcesses,
        first_look: Callable[[Any, Any, Any], None] | None = None,
    ) -> None:
        """
        Args:
            check: raises if the group is over.
            first_look: called with the first micro-batch of step 0, with what it is if it is read again, and with the
                data set.
        """
        self._first_look = first_look
        self.own, self.num_micro_batches = own, num_micro_batches
        self.most_workers = num_micro_batches
        self.epoch = order if isinstance(order, EpochOrder) else None
        self._fetch = fetch
        self._order = order
        self._workers = workers
        self._seed = seed ^ _SEEDED
        self._check = check
        self._processes = processes
        self._iterator: Iterator[Any] | None = None
        self._awaited: Iterator[_Request] = iter(())
        """The requests that were sent to worker processes and not answered yet, and those after them."""
        self._step: tuple[int, dict[int, Any]] = (0, {})
        """Batches of the present step that worker processes have read: it may be iterated over again."""

    def get(self, step: int, number: int, *, again: bool = False) -> Any:
        """The micro-batch `own[number]` of a step. `again`: it may be asked for once more."""
        if not self._workers.num_workers:
            request = self._request(step, number)
            batch = self._fetch[request]
            if step == 0 and self._first_look is not None:
                self._look(self._first_look, batch, request)
            return batch
        if self._step[0] != step:
            self._step = (step, {})
        kept = self._step[1]
        if number in kept:
            return kept[number]
        batch = self._from_workers(step, number)
        if step == 0 and self._first_look is not None:
            request = self._request(step, number)
            self._look(self._first_look, self._fetch[request], request)  # each process has a copy of each generator
        if again:
            kept[number] = batch
        return batch

    def _look(self, first_look: Callable[[Any, Any, Any], None], batch: Any, request: _Request) -> None:
        self._first_look, states = None, generator_states()
        self._fetch.dataset[request.indices[0]]  # else what every n-th sample has would be hidden
        first_look(batch, self._fetch[request], self._fetch.dataset)
        set_generator_states(states)

    def close(self) -> None:
        self._step = (0, {})
        if self._iterator is not None:
            dropped, self._iterator = [self._iterator], None
            self._processes.let_go(dropped)

    def _from_workers(self, step: int, number: int) -> Any:
        if self._iterator is None:
            sent, self._awaited = itertools.tee(self._requests(step))
            self._iterator = iter(self._loader(sent))
        while True:
            request = next(self._awaited)
            batch = self._received()
            if (request.step, request.number) == (step, number):
                return batch
            # The loop has left out a part of a step.

    def _received(self) -> Any:
        assert self._iterator is not None
        while True:
            try:
                return next(self._iterator)
            except RuntimeError as error:
                if not str(error).startswith(_TIMED_OUT):
                    raise
                self._check()

    def _loader(self, requests: Iterator[_Request]) -> DataLoader[Any]:
        workers = self._workers
        return DataLoader(
            cast(Any, self._fetch),
            sampler=requests,
            batch_size=None,
            collate_fn=_same,
            num_workers=workers.num_workers,
            prefetch_factor=workers.prefetch_factor or _PREFETCH_FACTOR,
            worker_init_fn=workers.worker_init_fn,
            multiprocessing_context=workers.context or CONTEXT,
            pin_memory=workers.pin_memory,
            timeout=_CHECK_S,
            generator=torch.Generator(),  # else the order of the global one's numbers would depend on the group
        )

    def _requests(self, step: int) -> Iterator[_Request]:
        for later in itertools.count(step) if self.epoch is None else range(step, self.epoch.end):
            for number in range(len(self.own)):
                yield self._request(later, number)

    def _request(self, step: int, number: int) -> _Request:
        micro = self.own[number].index
        return _Request(step, number, self._order.indices(step, micro), randomness_seed(self._seed, step, micro))


def _same(batch: Any) -> Any:
    return batch
