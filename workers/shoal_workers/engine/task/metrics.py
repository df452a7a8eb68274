"""Metrics of a task's own, beside its loss: the names that all ranks agree on, and this rank's share of the values.

    micro-batch    loss() returns (loss, {"accuracy": 0.5}); both get the weight of the micro-batch and the rank's share
    first pass     the ranks agree on the names; a stage of a pipeline that computes no loss learns them
    every pass     the shares of all ranks add up to the mean, as those of the loss do

The names are the same in every micro-batch, on every rank: otherwise a mean would be over a part of the samples. The
caller adds the shares up: in the vote, or exactly in deterministic mode. Called by `GradientPass` and `Validation`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal_workers.contract.checks.metric_names import MAX_METRICS, MAX_NAME_CHARS
from shoal_workers.engine.group.agreement import agree
from shoal_workers.engine.task.returned import place_of

_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's share of the mean loss and the mean metrics of a micro-batch. Scalars."""

    loss: Tensor
    metrics: Mapping[str, Tensor] | None
    """None: another rank of the pipeline computes them."""


class Metrics:
    """The metrics of one generation's training, or of its validation, on one rank. Training thread only.

    Args:
        function: the task's `loss`, for messages.
        writes_log: this rank says in the job's log what holds for all ranks.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device, *, writes_log: bool) -> None:
        self._function = function
        self._writes_log = writes_log
        self._device = device
        self._names: tuple[str, ...] | None = None
        self._not_finite: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Ascending. After `agree`."""
        assert self._names is not None, "agree comes first"
        return self._names

    def agree(self, shares: Sequence[Share]) -> None:
        """After each pass, before its shares are added up. A collective the first time, on all ranks.

        Raises:
            ValueError: the names differ between micro-batches, ranks or steps.
        """
        own = next((tuple(share.metrics) for share in shares if share.metrics is not None), None)
        if self._names is None:
            found = agree(
                None if own is None else _SEPARATOR.join(own),
                max_bytes=MAX_METRICS * (MAX_NAME_CHARS + 1),
                device=self._device,
            )
            self._names = tuple(found.text.split(_SEPARATOR)) if found.text else ()
            if own is not None and own != self._names:
                self._refuse(own, f"and on rank {found.rank}")
        for share in shares:
            if share.metrics is not None and tuple(share.metrics) != self._names:
                self._refuse(tuple(share.metrics), "and for the micro-batches before")

    def columns(self, shares: Sequence[Share]) -> list[Tensor]:
        """For each name the values of `shares`, of shape (n,) with any n."""
        present = [share.metrics for share in shares if share.metrics is not None]
        if not present:
            return [torch.zeros(0, device=self._device)] * len(self.names)
        return [torch.stack([metrics[name] for metrics in present]) for name in self.names]

    def sums(self, shares: Sequence[Share]) -> Tensor:
        """This rank's share of each metric, float64 of shape (len(names),). Added up as the losses are."""
        if not self.names:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        return torch.stack([column.sum().double() for column in self.columns(shares)])

    def by_name(self, values: Sequence[float]) -> dict[str, float]:
        """The sums over all ranks. One that is not finite is left out; the first time this is said in the log."""
        for name, value in zip(self.names, values, strict=True):
            if self._writes_log and not math.isfinite(value) and name not in self._not_finite:
                self._not_finite.add(name)
                sys.stderr.write(
                    f"loss() ({place_of(self._function)}): the metric {name!r} is {value} and is left out where it is "
                    "not finite\n"
                )
        return {name: value for name, value in zip(self.names, values, strict=True) if math.isfinite(value)}

    def _refuse(self, names: tuple[str, ...], elsewhere: str) -> None:
        raise ValueError(
            f"loss() ({place_of(self._function)}) returned {_words(names)} for this micro-batch, {elsewhere} "
            f"{_words(self.names)}. It must return the same metrics for every micro-batch, on every rank and in every "
            "step: their values are means over all samples. Return nan where a metric has no value."
        )


def _words(names: Sequence[str]) -> str:
    return f"the metrics {', '.join(names)}" if names else "no metrics"
