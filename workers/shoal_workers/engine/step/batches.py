"""Micro-batches: selects the samples, lets the task collate them, moves them to the device. Has no position of its own.

They are read on the training thread or, with `batch.num_workers`, ahead of it by processes (`batch_readers`): the same
samples, with the same random numbers. Called by the passes and by `Validation`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from shoal_workers.contract.batch_partition import randomness_seed, sample_positions
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.parallel.device_copies import BatchCopies
from shoal_workers.engine.randomness import generator_states, seed_everything, set_generator_states
from shoal_workers.engine.sample_order import training_order
from shoal_workers.engine.step.batch_readers import Key, Request, Stream
from shoal_workers.engine.step.first_look import look
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.task.task import Dataset, LoadedTask


class Batches:
    """Reads one split for one run. The caller has seeded the random generators."""

    def __init__(
        self,
        task: LoadedTask,
        data: Dataset,
        device: torch.device,
        ahead: Stream | None = None,
        first_look: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """
        Args:
            ahead: reads ahead; None if the training thread reads.
            first_look: called with the first micro-batch of step 0, and with what it is if it is read again.
        """
        self._first_look = first_look
        self._task = task
        self._data = data
        self._copies = BatchCopies(device)
        self._ahead = ahead
        self.num_samples = len(data)
        self.spent_s = 0.0
        """Seconds of the training thread in `training` and `of`. A copy to a GPU goes on after it."""

    def training(self, spec: JobSpec, step: int, micro_batch: int) -> Any:
        """The samples of a micro-batch of a step: the same for every world size."""
        with self._timed():
            read = self._ahead.get((step, micro_batch)) if self._ahead is not None else None
            batch = read[0] if read is not None else self._read_training(spec, step, micro_batch)
            self._look(batch, spec, step, micro_batch, lambda: self._read_training(spec, step, micro_batch))
            return self._copies.copy(batch)

    def training_pass(self, spec: JobSpec, step: int, micro_batches: Sequence[int]) -> Any:
        """The samples of several micro-batches of a step as one batch, read on the training thread. Each sample is read
        with the random numbers of its own micro-batch; `collate` gets those of the first."""

        def read() -> Any:
            samples: list[Any] = []
            for micro_batch in micro_batches:
                seed_everything(randomness_seed(spec.seed, step, micro_batch))
                samples += [self._sample(index) for index in _indices(self._task, self._data, spec, step, micro_batch)]
            seed_everything(randomness_seed(spec.seed, step, micro_batches[0]))
            return self._task.collate(samples)

        with self._timed():
            batch = read()
            self._look(batch, spec, step, micro_batches[0], read)
            return self._copies.copy(batch)

    def of(self, first: int, indices: Sequence[int]) -> Any:
        """The samples of these indices, of a validation in which they begin at the position `first`."""
        with self._timed():
            read = self._ahead.get((0, first)) if self._ahead is not None else None
            return self._copies.copy(read[0] if read is not None else self._read(indices))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent_s += time.perf_counter() - start

    def _look(self, batch: Any, spec: JobSpec, step: int, micro_batch: int, read: Callable[[], Any]) -> None:
        """The first time, in step 0. The generators stay as they are."""
        if step or self._first_look is None:
            return
        first_look, self._first_look = self._first_look, None
        states, again = generator_states(), batch
        self._sample(_indices(self._task, self._data, spec, step, micro_batch)[0])  # else every n-th sample would hide
        # A process that reads ahead has a copy of each generator: the first reading here would be the same as its own.
        for _ in range(1 if self._ahead is None else 2):
            seed_everything(randomness_seed(spec.seed, step, micro_batch))
            again = read()
        first_look(batch, again)
        set_generator_states(states)

    def _read_training(self, spec: JobSpec, step: int, micro_batch: int) -> Any:
        return self._read(_indices(self._task, self._data, spec, step, micro_batch))

    def _read(self, indices: Sequence[int]) -> Any:
        return self._task.collate([self._sample(index) for index in indices])

    def _sample(self, index: int) -> Any:
        try:
            return self._data[index]
        except Exception as error:
            error.add_note(f"Raised by sample {index:,} of {self.num_samples:,}.")
            raise


def training_batches(generation: Generation) -> Batches:
    """Those of the training in one generation."""
    task, spec = generation.task, generation.spec
    own = [micro_batch.index for micro_batch in generation.own_micro_batches()]
    if task.has_batch_loss:
        own *= 2  # each is read once for its embeddings, and once for its gradient

    def requests(first: Key) -> Iterator[Request]:
        for step in itertools.count(first[0]):
            for index in own[own.index(first[1]) if step == first[0] and first[1] in own else 0 :]:
                indices = tuple(_indices(task, task.train_data, spec, step, index))
                yield Request((step, index), indices, randomness_seed(spec.seed, step, index))

    readers = generation.readers
    ahead = readers.stream("train", requests, generation.check) if readers is not None else None
    place, say = task.line_of("build_dataset"), generation.remarks.add
    first_look = partial(look, data=task.train_data, place=place, say=say) if generation.rank == 0 else None
    return Batches(task, task.train_data, generation.device, ahead, first_look)


def _indices(task: LoadedTask, data: Dataset, spec: JobSpec, step: int, micro_batch: int) -> list[int]:
    batch = step if task.alternation is None else task.alternation.batch(step)
    if spec.islands is not None:
        batch = batch * spec.islands.num + (spec.islands.index or 0)
    positions = sample_positions(
        batch, micro_batch, global_size=spec.batch.global_size, micro_size=spec.batch.micro_size
    )
    return training_order(data, positions, seed=spec.seed)
