"""NamedPolicy: a policy as `shoal simulate` and the benchmark list it, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal_service.core.scheduling.market import Policy
from shoal_service.simulator.engine import Market, Progress, Run, simulate
from shoal_service.simulator.trace import TraceJob


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy, which may have to know what users asked for."""

    words: str
    """One line for people."""
    build: Callable[[Sequence[TraceJob]], Policy]
    every_s: float | None = None
    """It must be called at least so often; None: at events only."""

    def run(self, jobs: Sequence[TraceJob], market: Market, *, progress: Progress | None = None) -> Run:
        """Raises PolicyError. The shorter of the two intervals between regular calls holds."""
        intervals = [every_s for every_s in (self.every_s, market.every_s) if every_s]
        market = replace(market, every_s=min(intervals, default=None))
        return simulate(jobs, self.build(jobs), market, progress=progress)
