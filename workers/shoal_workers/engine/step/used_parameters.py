"""Which parameters no rank had a gradient for in a step: torch's optimizers skip those, so every rank must.

A parameter that this rank's micro-batches have not used has zeros as its gradient after the sum over ranks, because all
ranks take part in that sum. The ballots count the ranks that have used it; if there is none, its gradient is dropped
before the update: no state, no weight decay, as in a loop of plain torch. Several counts are packed into one number of
the vote. Called by `GradientPass` and the trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

_BITS = 52
"""A float64 represents every whole number of this many bits exactly."""


class UseCounts:
    """Counts of one generation: for each parameter of the whole model the ranks that have used it in the step."""

    def __init__(self, names: Iterable[str], world_size: int) -> None:
        """`names`: of all parameters that can have a gradient, in the same order on every rank."""
        self._names = tuple(names)
        self._bits = max(1, world_size.bit_length())
        per_number = _BITS // self._bits
        self._groups = [self._names[i : i + per_number] for i in range(0, len(self._names), per_number)]

    def encoded(self, used: Collection[str]) -> Tensor:
        """Float64 of shape (n,), n the same on every rank: what this rank adds to the counts."""
        numbers = [
            sum(1 << (self._bits * place) for place, name in enumerate(group) if name in used) for group in self._groups
        ]
        return torch.tensor(numbers, dtype=torch.float64)

    def unused(self, sums: Sequence[float]) -> list[str]:
        """The names that no rank has used, in their order. `sums`: of what all ranks have encoded."""
        mask = (1 << self._bits) - 1
        return [
            name
            for group, number in zip(self._groups, sums, strict=True)
            for place, name in enumerate(group)
            if not int(number) >> (self._bits * place) & mask
        ]
