"""Finds a rank that computes wrong without knowing it: each micro-batch that is tried is computed on three ranks.

    micro-batch of rank   0      1      2      3        rank r tries those of ranks r, r + 1, r + 2
    tried by           0 3 2  1 0 3  2 1 0  3 2 1       two that agree outvote the third

Once in `health.replay_every_steps` steps, before the step begins, so that a named rank's step is never applied. Only
forward passes, all of them now and of equal inputs: parameters, samples and random numbers are the same bits on every
rank, and so must be the losses. Parameters travel as the all-gather sends them, so a wrong bit in a stored shard shows
up everywhere alike and is not found; what is found is a processor or a kernel that goes wrong.

A task that gives another loss each time for the same batch disagrees with itself everywhere: nobody is named. Needs
three ranks. Called by the training loop on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shoal_workers.contract.batch_partition import micro_batches_of_rank
from shoal_workers.contract.messages import Assignment, ReplayMismatch
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.errors import ComputesWrong
from shoal_workers.engine.extent import is_due
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.step.gradients import GradientPass

_NUM_WITNESSES = 3
_CHECK_S = 0.02


class Replay:
    """The replays of one rank in one generation. Training thread only."""

    def __init__(
        self,
        spec: JobSpec,
        assignment: Assignment,
        gradients: GradientPass,
        outbox: Outbox,
        check: Callable[[], None],
    ) -> None:
        world_size = assignment.world_size
        layout = assignment.layout
        can_replay = layout.num_data_ranks == world_size >= _NUM_WITNESSES  # else ranks hold parts of a model
        self._every_steps = spec.health.replay_every_steps if can_replay else None
        self._assignment = assignment
        self._gradients = gradients
        self._outbox = outbox
        self._check = check
        owners = [(assignment.rank + distance) % world_size for distance in range(_NUM_WITNESSES)]
        self._tried = (
            [micro_batches_of_rank(spec.batch.num_micro_batches, owner, world_size)[0].index for owner in owners]
            if can_replay
            else []
        )

    def run(self, step: int) -> None:
        """Before the step that follows `step` completed ones. A collective when one is due.

        Raises:
            ComputesWrong: on all ranks, if one was named and the supervisor did nothing about it.
        """
        if not is_due(step + 1, self._every_steps):
            return
        losses = [self._gradients.forward_only(step, index) for index in self._tried]
        own = torch.stack(losses).double().nan_to_num(nan=-1.0).view(torch.int64)
        everyones = [torch.zeros_like(own) for _ in range(self._assignment.world_size)]
        dist.all_gather(everyones, own)
        self._check()
        odd_one = name_the_odd_one([found.tolist() for found in everyones])
        if odd_one is not None:
            self._accuse(odd_one, step + 1)

    def _accuse(self, rank: int, step: int) -> None:
        message = f"two other ranks agree on the losses of micro-batches of step {step}, and rank {rank} finds others"
        if self._assignment.rank == 0:
            self._outbox.tell(
                ReplayMismatch(
                    generation=self._assignment.generation, step=step, at=time.time(), rank=rank, message=message
                )
            )
        # The named rank must be gone before the next generation, so the word of the supervisor is waited for: to leave
        # now would be taken for a broken collective, and the group would re-form with that rank in it.
        deadline = time.monotonic() + self._assignment.collective_timeout_s
        while time.monotonic() < deadline:
            self._check()
            time.sleep(_CHECK_S)
        raise ComputesWrong(f"rank {rank} computes wrong: {message}. Step {step} was not applied.")


def name_the_odd_one(values: Sequence[Sequence[int]]) -> int | None:
    """The one rank that is outvoted; None: nobody is, or more than one.

    Args:
        values: [r][k]: the bits that rank r found for the micro-batch of rank (r + k) % len(values); k = 0, 1, 2.
    """
    world_size = len(values)
    if world_size < _NUM_WITNESSES:
        return None
    odd: set[int] = set()
    for owner in range(world_size):
        found = {(owner - k) % world_size: values[(owner - k) % world_size][k] for k in range(_NUM_WITNESSES)}
        for rank, value in found.items():
            others = {other for witness, other in found.items() if witness != rank}
            if len(others) == 1 and value not in others:
                odd.add(rank)
    return odd.pop() if len(odd) == 1 else None
