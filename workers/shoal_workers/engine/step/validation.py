"""Mean loss over a fixed draw of samples of the validation split, or over what counts in them: exact, and equal for
every world size. If the job keeps averages of its weights, these are validated.

The samples are drawn from the whole split, because the first ones of a sorted split are of one class. They are cut into
the same micro-batches for every world size, and the ranks take turns. A rank that has none left runs the first
micro-batch again with weight zero, so that all ranks take part in the same collectives. In deterministic mode the
ranks' sums are added exactly, so the result has the same bits for every world size. Called by the trainer.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.messages import Phase
from shoal_workers.contract.worker_reports import ValidationReport
from shoal_workers.engine.deterministic.integer_sum import sums_over_ranks
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.randomness import seed_everything
from shoal_workers.engine.sample_order import validation_order
from shoal_workers.engine.step.averaged_weights import averaged_weights
from shoal_workers.engine.step.batch_readers import Key, Request
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.gradients import Passes
from shoal_workers.engine.step.update import Update
from shoal_workers.engine.task.returned import Share
from shoal_workers.engine.task.task import Dataset

_STREAM = 0x56414C49
"""Separates these random numbers from the training's. All validations draw the same, so losses are comparable."""


class Validation:
    """Validates the model of one generation."""

    def __init__(
        self, generation: Generation, update: Update, assembly: Assembly, data: Dataset, passes: Passes
    ) -> None:
        spec, layout = generation.spec, generation.layout
        self._generation = generation
        self._update = update
        self._assembly = assembly
        self._passes = passes
        self._metrics = generation.task.metrics(generation.device, writes_log=generation.rank == 0)
        self._order = validation_order(data, spec.validation.samples, seed=spec.seed)
        self._num_samples = len(self._order)
        self._slices = validation_slices(
            self._num_samples, spec.batch.micro_size, layout.data_rank(generation.rank), layout.num_data_ranks
        )
        readers = generation.readers
        ahead = readers.stream("validation", self._requests, generation.check) if readers is not None else None
        self._batches = Batches(generation.task, data, generation.device, ahead)

    def run(self, step: int) -> ValidationReport:
        """Called by all ranks; the report is the same on each."""
        generation = self._generation
        generation.position.enter(Phase.VALIDATING)
        for part in self._assembly.parts:
            part.eval()
        sums = [torch.zeros((), dtype=torch.float64, device=generation.device)]
        shares: list[Share] = []
        with averaged_weights(self._assembly, self._update.averages()):
            for done, (samples, weight) in enumerate(self._slices):
                generation.check()
                # also progress: a validation may take longer than a hang
                generation.position.note(f"validating after step {step}, {100 * done // len(self._slices)} % done")
                seed_everything(self._seed(samples))
                with generation.user_code:
                    batch = self._batches.of(samples.start, self._order[samples.start : samples.stop])
                share = self._passes.run_forward(batch)
                if weight:
                    shares.append(share if share.weight is not None else _weighted(share, weight))
                    sums.append(shares[-1].loss.double())
            self._assembly.reshard()
        for part in self._assembly.parts:
            part.train()
        loss_sum = self._over_ranks(torch.stack(sums))
        other_sums = self._others_over_ranks(shares)
        total = self._total_weight(other_sums)
        loss_value = loss_sum / total
        per_byte = generation.task.bytes_per_token
        return ValidationReport(
            generation=generation.number,
            step=step,
            at=time.time(),
            loss=loss_value,
            bits_per_byte=loss_value / math.log(2) / per_byte if per_byte else None,
            samples=self._num_samples,
            metrics=self._metrics.by_name(other_sums, total),
        )

    def _requests(self, first: Key) -> Iterator[Request]:
        """What this rank reads, from its first micro-batch with this key on."""
        requests = [
            Request((0, part.start), tuple(self._order[part.start : part.stop]), self._seed(part))
            for part, _ in self._slices
        ]
        return itertools.dropwhile(lambda request: request.key != first, requests)

    def _seed(self, samples: range) -> int:
        return randomness_seed(self._generation.spec.seed ^ _STREAM, 0, samples.start)

    def _over_ranks(self, sums: Tensor) -> float:
        if self._generation.spec.deterministic:
            return sums_over_ranks([sums])[0]
        total = sums.sum()
        all_ranks().all_reduce(total)
        return float(total)

    def _others_over_ranks(self, shares: list[Share]) -> list[float]:
        """The sums of weights and metrics."""
        with self._generation.user_code:
            self._metrics.agree(shares)
        self._generation.check()
        if not self._metrics.num_sums:
            return []
        if self._generation.spec.deterministic:
            return sums_over_ranks(self._metrics.columns(shares))
        own = self._metrics.sums(shares)
        all_ranks().all_reduce(own)
        sums: list[float] = own.tolist()
        return sums

    def _total_weight(self, sums: list[float]) -> float:
        with self._generation.user_code:
            total = self._metrics.weight(sums, self._num_samples)
            if not total:
                raise ValueError(
                    f"{self._generation.task.line_of('loss')}: the weights of the {self._num_samples} drawn samples "
                    "of the validation split add up to 0, so they have no mean loss. Set validation.samples higher, or "
                    "correct the weights."
                )
        return total


def validation_of(generation: Generation, update: Update, assembly: Assembly, passes: Passes) -> Validation | None:
    """Returns None if the job does not validate, or if its data has no validation split."""
    data = generation.task.validation_data
    if data is None:
        return None
    return Validation(generation, update, assembly, data, passes)


def _weighted(share: Share, weight: int) -> Share:
    metrics = share.metrics and {name: value.double() * weight for name, value in share.metrics.items()}
    return Share(share.loss.double() * weight, metrics)


def validation_slices(num_samples: int, micro_size: int, rank: int, world_size: int) -> list[tuple[range, int]]:
    """Returns this rank's micro-batches as positions in the validation, each with its weight: its number of samples, or
    0 for padding. A pure function.

    All ranks get the same number; over all ranks every sample is in exactly one micro-batch with a weight above 0.
    """
    whole = [range(first, min(first + micro_size, num_samples)) for first in range(0, num_samples, micro_size)]
    rounds = -(-len(whole) // world_size)
    slices = [(samples, len(samples)) for samples in whole[rank::world_size]]
    return slices + [(whole[0], 0)] * (rounds - len(slices))
