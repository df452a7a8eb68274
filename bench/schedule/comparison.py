"""All policies on one case, and how the service's own compares with the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from schedule.cases import Case
from schedulers import POLICIES
from shoal_service.simulator.metrics import Metrics, measure

OURS = "shoal"
BEFORE = "first-come"
"""Shoal's policy before its market."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One case under every policy."""

    case: Case
    metrics: dict[str, Metrics]
    urgent_wait_s: dict[str, float]
    """By policy: the longest time that an urgent job waited for its first workers."""
    urgent_jct_h: dict[str, float]
    """By policy: the mean completion time of the urgent jobs."""

    @property
    def peers(self) -> dict[str, Metrics]:
        return {name: metrics for name, metrics in self.metrics.items() if name != OURS}

    @property
    def best_peer(self) -> str:
        """The peer with the shortest mean completion time."""
        return min(self.peers, key=lambda name: self.peers[name].mean_jct_h)

    @property
    def least_peer_p99_h(self) -> float:
        return min(metrics.p99_jct_h for metrics in self.peers.values())


def compare(case: Case, policies: Sequence[str] = ()) -> Compared:
    """Raises PolicyError. An unfinished job is an error of the benchmark: every case lets every job end."""
    metrics: dict[str, Metrics] = {}
    waits_s: dict[str, float] = {}
    jct_h: dict[str, float] = {}
    for name in policies or POLICIES:
        run = POLICIES[name].run(case.jobs, case.market, use_rules=True)
        metrics[name] = measure(run, case.market)
        assert not metrics[name].num_unfinished, f"{name} leaves jobs of {case.trace} waiting"
        urgent = [job for job in run.jobs if job.job.job_id in case.urgent]
        if urgent:
            waits_s[name] = max((job.started_at or 0.0) - job.job.submit_s for job in urgent)
            jct_h[name] = statistics.mean(((job.finished_at or 0.0) - job.job.submit_s) / 3600 for job in urgent)
    return Compared(case, metrics, waits_s, jct_h)
