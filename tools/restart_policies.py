"""Restart-based policies in the twin: what most systems do about a failure, at the costs that were published.

    failure --detect_s--> the job is ended --restart_s--> all ranks train again from the newest checkpoint

They meet the failures that Shoal meets, and the same account keeps their time. A failure in a restart begins it again.
Slow nodes and outages of the storage are left out, and there is always a node to replace a lost one: both favour them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_service.simulator.failures import DAY_S, Failure, Takes
from shoal_service.simulator.time_account import TimeAccount

_NO_RESTART = (Takes.SLOW, Takes.STORAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    name: str
    restart_s: float
    checkpoint_s: float
    """Seconds of training between two checkpoints."""
    detect_s: float = 0.0
    stall_s: float = 0.0
    """Seconds for which a checkpoint stops training."""

    @property
    def outage_s(self) -> float:
        return self.detect_s + self.restart_s

    def expect(self, failures_per_s: float) -> float:
        """Return the goodput by the formula of Young and Daly for failures that are independent: training of mean
        1 / rate until a failure, of which half an interval is lost, then an outage that failures begin again."""
        outage_s = math.expm1(failures_per_s * self.outage_s) / failures_per_s
        cycle_s = self.checkpoint_s + self.stall_s
        trained_s = self.checkpoint_s / math.expm1(failures_per_s * cycle_s)
        return trained_s / (1 / failures_per_s + outage_s)


def find_best_interval_s(stall_s: float, failures_per_s: float) -> float:
    """Return Young's interval between two checkpoints (CACM 1974)."""
    return math.sqrt(2 * stall_s / failures_per_s)


def run_restarts(policy: RestartPolicy, failures: Sequence[Failure], days: float) -> TimeAccount:
    """Let a job with this policy live through the failures."""
    account = TimeAccount(ideal_s=1.0)
    saved, down_until, end = 0, 0.0, days * DAY_S
    account.begin(0, 0.0)
    account.change_speed(0.0, 1.0, snapshot_s=policy.stall_s / policy.checkpoint_s)
    for failure in failures:
        if failure.cause.takes in _NO_RESTART or failure.at >= end:
            continue
        if failure.at >= down_until:
            account.stop(failure.at)
            done = account.count_steps(failure.at)
            saved += int((done - saved) // policy.checkpoint_s * policy.checkpoint_s)
        account.terms["form"] -= max(0.0, down_until - failure.at)
        down_until = failure.at + policy.outage_s
        account.terms["detect"] += policy.detect_s
        account.terms["form"] += policy.restart_s
        account.begin(saved, down_until)
    account.terms["form"] -= max(0.0, down_until - end)
    account.stop(end)
    account.settle()
    return account
