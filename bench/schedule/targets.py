"""What the service's policy must reach, and what it reaches, for each trace."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from schedule.comparison import BEFORE, OURS, Compared
from shoal_service.simulator.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Target:
    """One figure with its limit."""

    words: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def targets(same_costs: Compared, restart: Compared | None) -> list[Target]:
    """`same_costs`: all at Shoal's costs; `restart`: the peers at the restart costs of the trace.

    Fairness is no target where priorities make some jobs wait for others.
    """
    ours, peers = same_costs.metrics[OURS], same_costs.peers
    best = peers[same_costs.best_peer]
    found = [
        Target("mean JCT / first-come's", ours.mean_jct_h / peers[BEFORE].mean_jct_h, 0.12),
        Target("mean JCT / best peer's", ratio(same_costs), 0.97),
    ]
    if restart is not None:
        dearest = restart.peers[restart.best_peer].mean_jct_h
        found.append(Target("mean JCT / best peer's at restart costs", ours.mean_jct_h / dearest, 0.65))
    return [
        *found,
        Target("p99 / best peer's", ours.p99_jct_h / best.p99_jct_h, 1.05),
        Target("p99 / lowest of any peer", ours.p99_jct_h / same_costs.least_peer_p99_h, 1.05),
        *([] if same_costs.case.urgent else [Target("fairness", ours.fairness, 0.9, at_least=True)]),
        Target("moves and preemptions / max-min's", _moves(ours) / max(1, _moves(peers["max-min"])), 1.0),
    ]


def generated_targets(ratios: Sequence[float]) -> list[Target]:
    """`ratios`: mean JCT / best peer's, of each market."""
    return [
        Target("mean of mean JCT / best peer's", statistics.mean(ratios), 0.97),
        Target("median of mean JCT / best peer's", statistics.median(ratios), 0.97),
    ]


def example_targets(one: Compared) -> list[Target]:
    return [Target("mean JCT / best peer's of the example", ratio(one), 1.0)]


def ratio(one: Compared) -> float:
    """Mean JCT / that of the best peer, which need not be the same in each case."""
    return one.metrics[OURS].mean_jct_h / one.peers[one.best_peer].mean_jct_h


def _moves(metrics: Metrics) -> int:
    return metrics.num_moves + metrics.num_preemptions
