"""NamedPolicy: a policy as `shoal simulate` and the benchmark list it, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal_service.core.scheduling.market import Policy
from shoal_service.simulator.engine import Market, Progress, Run, simulate
from shoal_service.simulator.peers.per_cluster import per_cluster
from shoal_service.simulator.peers.rules import with_rules
from shoal_service.simulator.trace import TraceJob


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy, which may have to know what users asked for."""

    words: str
    """One line for people."""
    build: Callable[[Sequence[TraceJob]], Policy]
    has_rules: bool = False
    """It has rules of its own about projects or priorities; around the others `with_rules` can be put."""
    knows_clusters: bool = False
    """It says in which of several clusters a job starts; around the others `per_cluster` is put."""
    every_s: float | None = None
    """It must be called at least so often; None: at events only."""

    def run(
        self, jobs: Sequence[TraceJob], market: Market, *, use_rules: bool = False, progress: Progress | None = None
    ) -> Run:
        """Raises PolicyError. `use_rules`: projects and priorities hold for a policy without rules of its own, too."""
        # The shorter of the two intervals between regular calls holds.
        intervals = [every_s for every_s in (self.every_s, market.every_s) if every_s]
        market = replace(market, every_s=min(intervals, default=None))
        policy = self.build(jobs)
        if use_rules and not self.has_rules:
            policy = with_rules(policy)
        if market.capacity.clusters and not self.knows_clusters:
            policy = per_cluster(policy)
        return simulate(jobs, policy, market, progress=progress)
