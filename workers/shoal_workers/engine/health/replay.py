"""Finds a rank that computes wrong results without an error: three ranks compute each tried micro-batch.

    micro-batch of rank   0      1      2      3        rank r computes those of ranks r, r + 1, r + 2
    computed by           0 3 2  1 0 3  2 1 0  3 2 1    two ranks that agree outvote the third

It runs once in `health.replay_every_steps` steps, before the step begins, so a named rank's step is never applied. It
runs forward passes only, on equal inputs: parameters, samples and random numbers have the same bits on every rank, so
the losses must have the same bits as well. The parameters come through the all-gather, so a wrong bit in a stored shard
reaches every rank and is not found. A processor or a kernel that computes wrong is found.

A task whose loss differs from call to call for the same batch disagrees with itself everywhere; then no rank is named.
At least three ranks are needed. Called by the trainer on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

import torch

from shoal_workers.contract.batch_partition import micro_batches_of_rank
from shoal_workers.contract.worker_reports import ReplayMismatch
from shoal_workers.engine.generation_ends import ComputesWrong
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.schedule import is_due
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.gradients import GradientPass

_NUM_WITNESSES = 3
_CHECK_S = 0.02


class Replay:
    """The replays of one rank in one generation. Training thread only."""

    def __init__(self, generation: Generation, gradients: GradientPass) -> None:
        assignment, layout = generation.assignment, generation.layout
        world_size = layout.world_size
        can_replay = layout.num_data_ranks == world_size >= _NUM_WITNESSES  # else ranks hold parts of a model
        self._every_steps = generation.spec.health.replay_every_steps if can_replay else None
        self._generation = generation
        self._gradients = gradients
        owners = [(assignment.rank + distance) % world_size for distance in range(_NUM_WITNESSES)]
        num = generation.spec.batch.num_micro_batches
        self._tried = [micro_batches_of_rank(num, o, world_size)[0].index for o in owners] if can_replay else []

    def run(self, step: int) -> None:
        """Called before the step that follows `step` completed ones. It is a collective if a replay is due.

        Raises:
            ComputesWrong: on all ranks, if a rank was named and the supervisor did not end the generation.
        """
        if not is_due(step + 1, self._every_steps):
            return
        losses = [self._gradients.run_forward(step, index) for index in self._tried]
        self._gradients.reshard()
        # Bits are compared. nan has many patterns of bits, and gets one.
        bits = torch.stack(losses).double().nan_to_num(nan=-1.0).view(torch.int64).tolist()
        odd_one = name_the_odd_one(all_ranks().gather_values(bits))
        self._generation.check()
        if odd_one is not None:
            self._accuse(odd_one, step + 1)

    def _accuse(self, rank: int, step: int) -> None:
        generation = self._generation
        message = f"two other ranks agree on the losses of micro-batches of step {step}, and rank {rank} finds others"
        generation.report(
            ReplayMismatch(generation=generation.number, step=step, at=time.time(), rank=rank, message=message)
        )
        wait_for_removal(generation, f"rank {rank} computes wrong: {message}. Step {step} was not applied.")


def wait_for_removal(generation: Generation, message: str) -> NoReturn:
    """Called on all ranks once rank 0 has reported one of them: waits for the supervisor's interrupt. The named rank
    must be gone before the next generation. If this rank left now, that would look like a broken collective, and the
    group would re-form with the named rank in it.

    Raises:
        Fenced: the supervisor has ended the generation.
        ComputesWrong: it did not, within the time limit of a collective.
    """
    deadline = time.monotonic() + generation.assignment.collective_timeout_s
    while time.monotonic() < deadline:
        generation.check()
        time.sleep(_CHECK_S)
    raise ComputesWrong(message)


def name_the_odd_one(values: Sequence[Sequence[int]]) -> int | None:
    """The one rank that is outvoted; None if there is none, or more than one.

    Args:
        values: [r][k]: the bits that rank r found for the micro-batch of rank (r + k) % len(values); k = 0, 1, 2.
    """
    world_size = len(values)
    if world_size < _NUM_WITNESSES:
        return None
    odd: set[int] = set()
    for owner in range(world_size):
        differing = {(owner - k) % world_size: values[(owner - k) % world_size][k] for k in range(_NUM_WITNESSES)}
        for rank, value in differing.items():
            others = {other for witness, other in differing.items() if witness != rank}
            if len(others) == 1 and value not in others:
                odd.add(rank)
    return odd.pop() if len(odd) == 1 else None
