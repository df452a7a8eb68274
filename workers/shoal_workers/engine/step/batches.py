"""Micro-batches: selects the samples, lets the task collate them, moves them to the device. Has no position of its own.

Called by the passes and by `Validation`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from shoal_workers.contract.batch_partition import randomness_seed, sample_positions
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.sample_order import training_order
from shoal_workers.engine.task.randomness import seed_everything
from shoal_workers.engine.task.task import Dataset, LoadedTask
from shoal_workers.torch_internals import tree_map_only


class Batches:
    """Reads one split for one run."""

    def __init__(self, task: LoadedTask, data: Dataset, device: torch.device) -> None:
        self._task = task
        self._data = data
        self._device = device
        self.num_samples = len(data)
        self.spent_s = 0.0
        """Seconds of the training thread in `of`. A copy to a GPU goes on after it."""

    def training(self, spec: JobSpec, step: int, micro_batch: int) -> Any:
        """The samples of a micro-batch of a step: the same for every world size."""
        return self.of(self._indices(spec, step, micro_batch))

    def _indices(self, spec: JobSpec, step: int, micro_batch: int) -> list[int]:
        alternation = self._task.alternation
        batch = step if alternation is None else alternation.batch(step)
        positions = sample_positions(
            batch, micro_batch, global_size=spec.batch.global_size, micro_size=spec.batch.micro_size
        )
        return training_order(self._data, positions, seed=spec.seed)

    def training_pass(self, spec: JobSpec, step: int, micro_batches: Sequence[int]) -> Any:
        """The samples of several micro-batches of a step as one batch. Each sample is read with the random numbers of
        its own micro-batch; `collate` gets those of the first."""
        start = time.perf_counter()
        samples: list[Any] = []
        for micro_batch in micro_batches:
            seed_everything(randomness_seed(spec.seed, step, micro_batch))
            samples += [self._data[index] for index in self._indices(spec, step, micro_batch)]
        seed_everything(randomness_seed(spec.seed, step, micro_batches[0]))
        try:
            return self._collated(samples)
        finally:
            self.spent_s += time.perf_counter() - start

    def of(self, indices: list[int]) -> Any:
        """The samples of these indices."""
        start = time.perf_counter()
        try:
            return self._made(indices)
        finally:
            self.spent_s += time.perf_counter() - start

    def _made(self, indices: list[int]) -> Any:
        return self._collated([self._data[index] for index in indices])

    def _collated(self, samples: list[Any]) -> Any:
        batch = self._task.collate(samples)
        if self._device.type == "cpu":
            return batch
        return tree_map_only(torch.Tensor, lambda t: t.to(self._device, non_blocking=True), batch)
