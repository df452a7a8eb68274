"""The metrics of small runs, worked out by hand."""

import math
from dataclasses import replace

import pytest

from kit.market_traces import market, scripted, trace_job
from shoal_service.core.scheduling.market import Project
from shoal_service.simulator.engine import Costs, simulate
from shoal_service.simulator.metrics import finish_time_ratios, jain, measure, percentile
from shoal_service.simulator.traces import Capacity


def test_completion_times_makespan_utilisation_and_goodput() -> None:
    there = market(4, Costs(switch_s=1, start_s=2))
    jobs = [trace_job("a", work=3600 * 4 - 8), trace_job("b", work=3600 * 2 - 4, submit_s=3600)]
    found = measure(simulate(jobs, scripted({0: {"a": 4}, 3600: {"b": 2}}), there), there)
    assert (found.mean_jct_h, found.median_jct_h, found.makespan_h) == (1, 1, 2)
    assert found.p99_jct_h == pytest.approx(1)
    assert found.utilisation == (4 + 2) / 8
    assert found.goodput == pytest.approx((3598 * 4 + 3598 * 2) / (3600 * 6))
    assert (found.num_unfinished, found.num_moves, found.num_preemptions, found.mean_wait_s) == (0, 0, 0, 0)


def test_jobs_that_never_finish_are_counted_and_leave_the_rest_out() -> None:
    there = market(4)
    found = measure(simulate([trace_job("a")], lambda state, now: [], there), there)
    assert (found.num_jobs, found.num_unfinished) == (1, 1)
    assert math.isnan(found.mean_jct_h) and math.isnan(found.fairness)


def test_equal_shares_all_the_time_have_ratio_one() -> None:
    there = market(4)
    jobs = [trace_job("a", work=100, workers=(1, 2)), trace_job("b", work=100, workers=(1, 2))]
    ratios = finish_time_ratios(simulate(jobs, scripted({0: {"a": 2, "b": 2}}), there), there)
    assert ratios == {"a": pytest.approx(1), "b": pytest.approx(1)}


def test_who_waits_has_a_larger_ratio() -> None:
    """Two jobs of 100 s on the only worker, one after the other: both are due half of it while both are there."""
    there = market(1)
    jobs = [trace_job("a", workers=(1, 1)), trace_job("b", workers=(1, 1))]
    run = simulate(jobs, scripted({0: {"a": 1}, 100: {"b": 1}}), there)
    # a: 100 s of half a worker; b: 100 s of a half and 100 s of a whole one, on average 3/4
    assert finish_time_ratios(run, there) == {"a": pytest.approx(100 / 200), "b": pytest.approx(200 / (100 / 0.75))}
    assert measure(run, there).fairness == pytest.approx((0.5 + 1.5) ** 2 / (2 * (0.25 + 2.25)))


def test_a_project_of_twice_the_weight_is_due_twice_the_workers() -> None:
    there = replace(market(6), projects={"heavy": Project(name="heavy", weight=2)})
    jobs = [replace(trace_job("a", work=400), project="heavy"), trace_job("b", work=200, workers=(1, 4))]
    run = simulate(jobs, scripted({0: {"a": 4, "b": 2}}), there)
    assert finish_time_ratios(run, there) == {"a": pytest.approx(1), "b": pytest.approx(1)}
    assert measure(run, there).project_fairness == pytest.approx(1)


def test_jain_and_percentile() -> None:
    assert (jain([3, 3, 3]), jain([1, 0, 0, 0])) == (1, 0.25)
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([7], 0.99) == 7


def test_the_worker_seconds_of_a_capacity_that_changes() -> None:
    capacity = Capacity(2, ((0.0, 3), (10.0, 1), (20.0, 4)))
    assert capacity.worker_seconds(0, 30) == 60 + 20 + 80
    assert capacity.worker_seconds(5, 15) == 30 + 10
