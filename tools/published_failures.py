"""What others have published about long runs, and what the twin needs besides, with the source of each number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from restart_policies import RestartPolicy, find_best_interval_s
from shoal_service.simulator.failures import DAY_S, Cause, Takes, parse_rates

RATES = Path(__file__).parents[1] / "examples" / "failure-rates.yaml"
TOLERANCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    name: str
    gpus: int
    days: float
    causes: tuple[Cause, ...]
    policy: RestartPolicy
    goodput: float
    is_bound: bool
    """True if the source says "over" or "above"."""
    published: str
    """Where the numbers are, as they could be checked."""
    assumed: str
    """What the source does not say, and the value that stands for it."""

    def find_difference(self, goodput: float) -> float:
        """Return by how much the twin's goodput misses what was published."""
        difference = goodput - self.goodput
        return min(0.0, difference) if self.is_bound else difference


def llama_causes() -> tuple[Cause, ...]:
    return parse_rates(yaml.safe_load(RATES.read_text(encoding="utf-8")), RATES.name)


def _per_day(number: float) -> tuple[Cause, ...]:
    return (Cause(name="any", takes=Takes.NODE, per_day=number, repair_h=24.0),)


def _per_node_day(rate: float) -> tuple[Cause, ...]:
    return (Cause(name="any", takes=Takes.NODE, per_node_day=rate, repair_h=24.0),)


_RSC1, _RSC2 = 6.50e-3, 2.34e-3
_MINUTE = 60.0


def published_runs() -> list[PublishedRun]:
    rsc1_rate = _RSC1 * 12_000 / 8 / DAY_S
    return [
        PublishedRun(
            name="Llama 3 405B",
            gpus=16_384,
            days=54,
            causes=_per_day(466 / 54),
            policy=RestartPolicy(name="restart", restart_s=10 * _MINUTE, checkpoint_s=5 * _MINUTE),
            goodput=0.90,
            is_bound=True,
            published="arXiv 2407.21783: 466 interruptions in 54 days, 419 of them unexpected, over 90 %",
            assumed="restart 10 min, as ByteRobust and FT-HSDP (2602.00277) say of such jobs; a checkpoint every 5 min",
        ),
        PublishedRun(
            name="RSC-1, 2,048 to 4,096 GPUs",
            gpus=3_072,
            days=30,
            causes=_per_node_day(_RSC1),
            policy=RestartPolicy(name="restart", restart_s=5 * _MINUTE, checkpoint_s=60 * _MINUTE),
            goodput=0.90,
            is_bound=True,
            published="arXiv 2410.21680: 6.50 failures per 1,000 node-days; restart 5 to 20 min; hourly; over 0.9",
            assumed="restart 5 min; a checkpoint stops nothing, as that average assumes",
        ),
        PublishedRun(
            name="RSC-1, 12,000 GPUs",
            gpus=12_000,
            days=30,
            causes=_per_node_day(_RSC1),
            policy=RestartPolicy(
                name="restart",
                restart_s=5 * _MINUTE,
                checkpoint_s=round(find_best_interval_s(10.0, rsc1_rate)),
                stall_s=10.0,
            ),
            goodput=0.90,
            is_bound=False,
            published="arXiv 2410.21680: 0.9 needs checkpoints that stop training for about 10 s (a projection)",
            assumed="restart 5 min; Young's interval",
        ),
        PublishedRun(
            name="RSC-2 rates, 100,000 GPUs",
            gpus=100_000,
            days=30,
            causes=_per_node_day(_RSC2),
            policy=RestartPolicy(name="restart", restart_s=2 * _MINUTE, checkpoint_s=2 * _MINUTE, stall_s=2.4),
            goodput=0.90,
            is_bound=False,
            published="arXiv 2410.21680: 0.9 needs an interval and a restart of about 2 min (a projection)",
            assumed="a checkpoint stops training for 2.4 s, for which 2 min is Young's interval",
        ),
        PublishedRun(
            name="MegaScale",
            gpus=12_288,
            days=28,
            causes=_per_day(100 / 28),
            policy=RestartPolicy(
                name="restart", detect_s=10 * _MINUTE, restart_s=7.5 * _MINUTE, checkpoint_s=15 * _MINUTE
            ),
            goodput=0.90,
            is_bound=True,
            published="NSDI 2024: over 100 restarts in weeks; found in under 10 min; caught up in 15 min; over 90 %",
            assumed="100 restarts in 4 weeks; half of the 15 min is work that is done again",
        ),
        PublishedRun(
            name="ByteRobust, dense",
            gpus=9_600,
            days=90,
            causes=llama_causes(),
            policy=RestartPolicy(name="restart", restart_s=10 * _MINUTE, checkpoint_s=10.0),
            goodput=0.97,
            is_bound=False,
            published="arXiv 2509.16293: up to 97 % in three months; a failover takes 10 min and more at 10,000 GPUs",
            assumed="the rates of Llama 3, since the number of its failures could not be checked; every step is kept",
        ),
    ]
