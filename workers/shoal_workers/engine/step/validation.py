"""Mean loss over the first samples of the validation split: exact, and equal for every world size.

The samples are cut into the same micro-batches whatever the world size; ranks take turns, and those that have none left
run the first one again with weight zero, so that everybody's collectives match. In deterministic mode the ranks' sums
are added exactly, which makes the result the same bits.
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.messages import Phase, ValidationReport
from shoal_workers.engine.deterministic.integer_sum import sum_over_ranks
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.passes import Passes, Setting
from shoal_workers.engine.step.randomness import seed_everything
from shoal_workers.engine.step.validation_slices import validation_slices

_STREAM = 0x56414C49
"""Set apart from the training's randomness; the same draws in every validation, so that they can be compared."""


class Validation:
    """Validates one generation's model."""

    def __init__(
        self,
        setting: Setting,
        passes: Passes,
        batches: Batches,
        generation: int,
    ) -> None:
        spec, layout = setting.spec, setting.layout
        self._setting = setting
        self._spec = spec
        self._generation = generation
        self._passes = passes
        self._batches = batches
        self._num_samples = min(spec.validation.samples, batches.num_samples)
        self._slices = validation_slices(
            self._num_samples, spec.batch.micro_size, layout.data_rank(setting.meshes.rank), layout.num_data_ranks
        )

    def run(self, step: int, device: torch.device) -> ValidationReport:
        """All ranks; the report is the same on each."""
        self._setting.position.enter(Phase.VALIDATING)
        parts = self._setting.assembly.parts
        for part in parts:
            part.eval()
        sums = [torch.zeros((), dtype=torch.float64, device=device)]
        for samples, weight in self._slices:
            self._setting.check()
            seed_everything(randomness_seed(self._spec.seed ^ _STREAM, 0, samples.start))
            with self._setting.user_code:
                batch = self._batches.of(list(samples))
            loss = self._passes.forward_only(batch)
            if weight:
                sums.append(loss.double() * weight)
        for part in parts:
            part.train()
        loss_value = self._over_ranks(torch.stack(sums)) / self._num_samples
        per_byte = self._setting.task.bytes_per_token
        return ValidationReport(
            generation=self._generation,
            step=step,
            at=time.time(),
            loss=loss_value,
            bits_per_byte=loss_value / math.log(2) / per_byte if per_byte else None,
            samples=self._num_samples,
        )

    def _over_ranks(self, sums: Tensor) -> float:
        if self._spec.deterministic:
            return sum_over_ranks(sums)
        total = sums.sum()
        dist.all_reduce(total)
        return float(total)
