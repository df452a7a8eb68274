"""Whether a step that is not finite is the task's fault, or that of a worker: a bit that flipped in its memory or in a
computation.

    ranks that hold the same state hold other bits      the state is wrong: replica_check.py names the ranks
    computed twice again, the step is finite, and       a computation was wrong: if every rank computes whole samples,
    every rank repeats its own loss bit by bit          that of the rank with the loss that was not finite
    anything else                                       the task: health.non_finite decides

Nothing was updated yet, so the step can be repeated. A task whose losses differ from pass to pass accuses no rank. A
wrong value that stays in a shard without replicas is not found here. Called by the trainer on every rank, after a vote.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_workers.contract.suspects import Resource, Suspect
from shoal_workers.contract.worker_reports import ReplayMismatch, ReplicaMismatch
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.health.replay import wait_for_removal
from shoal_workers.engine.health.replica_check import ReplicaCheck
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.gradients import GradientPass
from shoal_workers.engine.step.vote import Verdict


@dataclass(frozen=True, slots=True)
class Pass:
    """One computation of the step on one rank."""

    loss_bits: int
    is_loss_finite: bool
    is_norm_finite: bool
    """The norm of its shard of the reduced gradient is finite."""

    @property
    def is_finite(self) -> bool:
        return self.is_loss_finite and self.is_norm_finite


@dataclass(frozen=True, slots=True)
class WrongPass:
    """A computation went wrong."""

    rank: int | None
    """None if it is not known on which rank."""


class NonFiniteCheck:
    """Training thread only."""

    def __init__(self, generation: Generation, gradients: GradientPass, replicas: ReplicaCheck) -> None:
        self._generation = generation
        self._gradients = gradients
        self._replicas = replicas

    def run(self, step: int, scale: float, loss: Tensor, squared_norm: Tensor) -> None:
        """A collective. `loss`, `squared_norm`: of the pass that was not finite, in the step that follows `step`
        completed ones. Afterwards no parameter has a gradient.

        Raises:
            ComputesWrong: on all ranks, if a worker is at fault and the supervisor did not end the generation.
        """
        self._replicas.compare_values_that_are_not_finite(step)
        generation = self._generation
        passes = [_pass(loss, squared_norm), *self._repeat(step, scale)]
        by_rank, layout = all_ranks().gather_values(passes), generation.layout
        generation.check()
        wrong = find_wrong_pass(by_rank, computes_whole_samples=layout.num_data_ranks == layout.world_size)
        if wrong is not None:
            self._accuse(wrong, step)

    def _repeat(self, step: int, scale: float) -> list[Pass]:
        passes = []
        for _ in range(2):
            self._gradients.forget()
            loss = self._gradients.run(step, scale)
            passes.append(_pass(loss, self._gradients.squared_norm(self._gradients.gradients())))
        self._gradients.forget()
        return passes

    def _accuse(self, wrong: WrongPass, step: int) -> None:
        generation = self._generation
        where = "" if wrong.rank is None else f" on rank {wrong.rank}"
        message = f"loss or gradient of step {step + 1} was not finite{where}, and is finite when it is computed again"
        number, now = generation.number, time.time()
        generation.report(
            ReplicaMismatch(generation=number, step=step, at=now, ranks=(), is_certain=False, message=message)
            if wrong.rank is None
            else ReplayMismatch(generation=number, step=step + 1, at=now, rank=wrong.rank, message=message)
        )
        wait_for_removal(generation, f"{message}. It was not applied.")


def find_wrong_pass(passes: Sequence[Sequence[Pass]], *, computes_whole_samples: bool) -> WrongPass | None:
    """Returns None if the task gives values that are not finite, or other values each time.

    Args:
        passes: [rank]: the first, and the same step twice again.
        computes_whole_samples: no two ranks compute parts of the same sample.
    """
    for first, second, third in passes:
        if not (second.is_finite and third.is_finite) or second.loss_bits != third.loss_bits:
            return None
        if first.is_loss_finite and first.loss_bits != second.loss_bits:
            return None
    wrong = [rank for rank, (first, _, _) in enumerate(passes) if not first.is_loss_finite]
    return WrongPass(wrong[0] if len(wrong) == 1 and computes_whole_samples else None)


def _pass(loss: Tensor, squared_norm: Tensor) -> Pass:
    value = loss.detach().double()
    return Pass(
        loss_bits=int(value.nan_to_num().reshape(1).view(torch.int64)),
        is_loss_finite=bool(torch.isfinite(value)),
        is_norm_finite=bool(torch.isfinite(squared_norm)),
    )


def not_finite_ranks(verdict: Verdict) -> tuple[int, ...]:
    """Those whose own part of the loss is not finite. Empty if all ranks are alike: then no rank stands out."""
    return verdict.not_finite if len(verdict.not_finite) < len(verdict.compute_s) else ()


def whose(verdict: Verdict) -> str:
    ranks = ", ".join(map(str, not_finite_ranks(verdict)))
    return f" Only the loss of rank {ranks} is not finite." if ranks else ""


def suspect_of(verdict: Verdict, step: int) -> Suspect | None:
    ranks = not_finite_ranks(verdict)
    evidence = f"in step {step} its own part of the loss is not finite, and that of every other rank is"
    return Suspect(resource=Resource.NUMBERS, ranks=ranks, evidence=(evidence,)) if ranks else None


def finite(value: float) -> float | None:
    """Returns None if JSON cannot express the value."""
    return value if math.isfinite(value) else None
