"""ThroughputCurve: samples per second at each world size, interpolated between the known ones; and its upper hull."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

Segment: TypeAlias = tuple[int, float]
"""World size at the end of a segment of the hull, and samples per second that each worker of the segment adds."""


@dataclass(frozen=True, slots=True)
class ThroughputCurve:
    """Rates at some world sizes. Measured curves need not rise everywhere."""

    sizes: tuple[int, ...]
    """World sizes, rising, at least one, each at least 1."""
    rates: tuple[float, ...]
    """Samples per second at these sizes; positive."""

    def __post_init__(self) -> None:
        assert self.sizes and len(self.sizes) == len(self.rates), "one rate per world size"
        assert self.sizes[0] >= 1 and all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        assert all(rate > 0 for rate in self.rates)

    @staticmethod
    def linear(rate: float = 1.0, most: int = 2) -> ThroughputCurve:
        """Perfect scaling up to `most` workers: what is assumed of a job of which nothing is known."""
        return ThroughputCurve((1, max(2, most)), (rate, rate * max(2, most)))

    def rate(self, workers: int) -> float:
        """Samples per second with this number of workers.

        Linear between two known sizes, proportional below the smallest, constant above the largest.
        """
        if workers == self.sizes[0]:
            return self.rates[0]
        if workers <= 0:
            return 0.0
        at = bisect_left(self.sizes, workers)
        if at == len(self.sizes):
            return self.rates[-1]
        if self.sizes[at] == workers:
            return self.rates[at]
        if at == 0:
            return self.rates[0] * workers / self.sizes[0]
        low, high = self.sizes[at - 1], self.sizes[at]
        share = (workers - low) / (high - low)
        return self.rates[at - 1] * (1 - share) + self.rates[at] * share


@lru_cache(maxsize=65536)
def hull(curve: ThroughputCurve, least: int, most: int) -> tuple[Segment, ...]:
    """The upper concave hull of the curve between two sizes, as segments of falling gain, up to its highest rate."""
    corners: list[tuple[int, float]] = [(least, curve.rate(least))]
    sizes = {size for size in curve.sizes if least < size < most}
    for size in sorted(sizes | {most} if most > least else sizes):
        rate = curve.rate(size)
        while len(corners) > 1 and _gain(corners[-2], corners[-1]) <= _gain(corners[-1], (size, rate)):
            corners.pop()
        corners.append((size, rate))
    return tuple(
        (after[0], _gain(before, after)) for before, after in pairwise(corners) if after[1] > before[1] * (1 + 1e-9)
    )


def _gain(before: tuple[int, float], after: tuple[int, float]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])
