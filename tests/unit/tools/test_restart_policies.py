"""Restart-based policies in the twin: as their formula, and as the runs that were published."""

from __future__ import annotations

import statistics

import pytest

from published_failures import TOLERANCE, PublishedRun, published_runs
from restart_policies import RestartPolicy, find_best_interval_s, run_restarts
from shoal_service.simulator.failures import Cause, Failure, Takes, draw_failures

DAY_S = 86400.0
ANY = Cause(name="any", takes=Takes.NODE, per_day=24.0)


def goodput(policy: RestartPolicy, *, days: float = 60.0, per_day: float = 24.0, seeds: int = 4) -> float:
    cause = Cause(name="any", takes=Takes.NODE, per_day=per_day)
    shares = []
    for seed in range(seeds):
        failures = draw_failures([cause], gpus=8, nodes=1, days=days, seed=seed)
        shares.append(run_restarts(policy, failures, days).terms["productive"] / (days * DAY_S))
    return statistics.mean(shares)


@pytest.mark.parametrize("restart_s", [60.0, 600.0, 1800.0])
@pytest.mark.parametrize(("checkpoint_s", "stall_s"), [(300.0, 0.0), (300.0, 15.0), (1800.0, 15.0)])
def test_the_goodput_is_that_of_the_formula(restart_s: float, checkpoint_s: float, stall_s: float) -> None:
    policy = RestartPolicy(name="x", restart_s=restart_s, detect_s=30.0, checkpoint_s=checkpoint_s, stall_s=stall_s)
    assert goodput(policy) == pytest.approx(policy.expect(24.0 / DAY_S), abs=0.012)


def test_youngs_interval_is_the_best_one() -> None:
    best_s = find_best_interval_s(15.0, 24.0 / DAY_S)
    shares = {
        factor: goodput(RestartPolicy(name="x", restart_s=60.0, checkpoint_s=factor * best_s, stall_s=15.0))
        for factor in (0.25, 1.0, 4.0)
    }
    assert shares[1.0] == max(shares.values())


def test_one_failure_costs_its_outage_and_what_no_checkpoint_has() -> None:
    policy = RestartPolicy(name="x", detect_s=60.0, restart_s=240.0, checkpoint_s=1000.0)
    account = run_restarts(policy, [Failure(3700.0, ANY, 0.0, takes_buddy=False)], 0.1)
    assert account.terms["lost"] == pytest.approx(700.0)
    assert (account.terms["detect"], account.terms["form"]) == (60.0, 240.0)
    assert sum(account.terms.values()) == pytest.approx(0.1 * DAY_S)


def test_a_failure_in_a_restart_begins_it_again() -> None:
    policy = RestartPolicy(name="x", restart_s=600.0, checkpoint_s=100.0)
    failures = [Failure(at, ANY, 0.0, takes_buddy=False) for at in (1000.0, 1400.0)]
    account = run_restarts(policy, failures, 0.1)
    assert account.terms["form"] == pytest.approx(1000.0)
    assert sum(account.terms.values()) == pytest.approx(0.1 * DAY_S)


@pytest.mark.parametrize("run", published_runs(), ids=lambda run: run.name)
def test_a_published_run_is_met_within_three_points(run: PublishedRun) -> None:
    shares = []
    for seed in range(8):
        failures = draw_failures(run.causes, gpus=run.gpus, nodes=run.gpus // 8, days=run.days, seed=seed)
        shares.append(run_restarts(run.policy, failures, run.days).terms["productive"] / (run.days * DAY_S))
    assert abs(run.find_difference(statistics.mean(shares))) <= TOLERANCE
    rate = sum(cause.find_rate(run.gpus, run.gpus // 8) for cause in run.causes)
    assert statistics.mean(shares) == pytest.approx(run.policy.expect(rate), abs=0.01)
