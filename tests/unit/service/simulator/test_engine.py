"""Time, work and costs in the engine and the metrics of small runs, worked out by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from kit.market_traces import FREE, market, scripted, trace_job
from schedulers import first_come
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import Decision, MarketJob, MarketState, Project, Start
from shoal_service.simulator.engine import Costs, Market, PolicyError, SimulationResult, simulate
from shoal_service.simulator.metrics import finish_time_ratios, jain, measure, percentile
from shoal_service.simulator.traces import AWAY, Capacity


def test_a_job_alone_takes_its_start_and_its_work() -> None:
    run = simulate([trace_job("a", submit_s=10, work=100)], scripted({0: {"a": 4}}), market(4, Costs(start_s=3)))
    (job,) = run.jobs
    assert (job.started_at, job.finished_at) == (10, 10 + 3 + 100 / 4)
    assert (job.served_s, job.trained_s) == (4 * 28, 4 * 25)


def test_a_move_costs_its_seconds_and_no_work() -> None:
    jobs = [trace_job("a", work=100), trace_job("b", submit_s=5, work=1000)]
    run = simulate(jobs, scripted({0: {"a": 4}, 5: {"a": 2, "b": 2}}), market(4, Costs(switch_s=1, start_s=2)))
    a, b = run.jobs
    assert a.history == [(0, 4), (5, 2), (50, 0)]  # 3 s of 4 workers, 1 s of nothing, 88 samples with 2
    assert (a.num_moves, a.num_preemptions, b.num_moves) == (1, 0, 0)
    assert b.finished_at == 5 + 2 + 500


def test_restart_costs_of_the_trace_replace_the_measured_ones_where_there_are_any() -> None:
    known = replace(trace_job("known"), restart_s=50.0)
    costs = Costs(switch_s=1, start_s=2, use_restart_s=True)
    assert (costs.find_pauses(known), costs.find_pauses(trace_job("unknown"))) == ((50, 50), (1, 2))


def test_nodes_that_leave_take_the_workers_of_the_youngest_start_and_give_them_back() -> None:
    capacity = Capacity(1, ((0.0, 8), (10.0, 6), (20.0, 8)))
    jobs = [trace_job("a", work=400), trace_job("b", work=400)]
    a, b = simulate(jobs, first_come, Market(capacity=capacity, costs=FREE)).jobs
    assert a.history == [(0, 4), (100, 0)]
    assert b.history == [(0, 4), (10, 2), (20, 4), (105, 0)]


def test_a_policy_sees_what_is_left_and_what_was_served() -> None:
    seen: list[MarketJob] = []

    def policy(state: MarketState, now: float) -> Sequence[Decision]:
        seen.extend(job for job in state.jobs if job.job_id == "a")
        return scripted({0: {"a": 4}})(state, now)

    simulate([trace_job("a", work=100), trace_job("b", submit_s=5, work=1)], policy, market(4, Costs(start_s=1)))
    assert [(job.granted, job.left, job.done, job.served_s, job.moved_at) for job in seen[:2]] == [
        (0, 100, 0, 0, None),
        (4, 84, 16, 20, 0),
    ]


def test_a_policy_is_called_at_events_and_when_asked_regularly() -> None:
    times: list[float] = []

    def policy(state: MarketState, now: float) -> Sequence[Decision]:
        times.append(now)
        return scripted({0: {"a": 4, "b": 4}})(state, now)

    jobs = [trace_job("a", work=100), trace_job("b", submit_s=9, work=40)]
    simulate(jobs, policy, market(8))
    simulate(jobs, policy, market(8, every_s=10))
    assert times == [0, 9, 19, 0, 9, 19]
    times.clear()
    simulate(jobs, policy, market(8, every_s=4))
    assert times == [0, 4, 8, 9, 13, 17, 19, 23]


def clusters(*west: tuple[float, int], costs: Costs = FREE) -> Market:
    """Four workers in the cluster east, and the steps of the cluster west."""
    return Market(capacity=Capacity.of_clusters({"east": [(0.0, 4)], "west": west}, 1), costs=costs)


def test_jobs_of_a_lost_cluster_start_in_another_one_after_their_wait_and_lose_no_work() -> None:
    jobs = [replace(trace_job("a", work=400), wait_s=50.0), replace(trace_job("b", work=400), wait_s=50.0)]
    run = simulate(jobs, decide, clusters((0.0, 4), (10.0, AWAY)))
    a, b = run.jobs
    assert (a.cluster_starts, a.history) == ([(0, "east")], [(0, 4), (60, 3), (112, 4), (118, 0)]) or a.finished_at
    assert [name for _, name in b.cluster_starts] == ["west", "east"]
    assert b.history[:3] == [(0, 4), (10, 0), (60, b.history[2][1])], "it stands still for 50 s, and starts in the east"
    assert (b.num_losses, b.num_preemptions) == (1, 0)
    assert max(_held(run, at) for at, _ in (*a.history, *b.history) if at >= 60) <= 4
    samples = sum(workers * (until - at) for (at, workers), (until, _) in pairwise(b.history))
    assert samples == pytest.approx(400)


def _held(run: SimulationResult, at: float) -> int:
    return sum(next((held for since, held in reversed(job.history) if since <= at), 0) for job in run.jobs)


def test_a_tied_job_waits_for_its_cluster_and_goes_on_there_for_the_price_of_a_start() -> None:
    tied = replace(trace_job("a", work=400), cluster="west", wait_s=1.0)
    market = clusters((0.0, 4), (10.0, AWAY), (500.0, 4), costs=Costs(start_s=3.0, switch_s=0.0))
    (a,) = simulate([tied], decide, market).jobs
    assert a.history == [(0, 4), (10, 0), (500, 4), (500 + 3 + (400 - 7 * 4) / 4, 0)]
    assert (a.num_losses, [name for _, name in a.cluster_starts]) == (0, ["west"])


def test_a_cluster_that_is_back_within_the_wait_keeps_its_jobs() -> None:
    job = replace(trace_job("a", work=400), wait_s=50.0)
    market = Market(capacity=Capacity.of_clusters({"east": [(0.0, 1)], "west": [(0.0, 4), (10.0, AWAY), (40.0, 4)]}, 1))
    (a,) = simulate([job], decide, replace(market, costs=FREE)).jobs
    assert (a.history, a.num_losses) == ([(0, 4), (10, 0), (40, 4), (130, 0)], 0)


@pytest.mark.parametrize("every_s", [None, 60.0])
def test_a_tied_job_whose_cluster_never_returns_ends_the_simulation_unfinished(every_s: float | None) -> None:
    tied = replace(trace_job("a"), cluster="west")
    run = simulate([tied], decide, replace(clusters((0.0, 4), (10.0, AWAY)), every_s=every_s))
    assert run.jobs[0].finished_at is None


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (Start("a", 4, ""), "job a was started in the cluster '', and there is none that takes jobs"),
        (Start("a", 4, "", "east"), "job a was started in the cluster east, and may run in west only"),
    ],
)
def test_a_start_outside_the_jobs_clusters_is_refused(start: Start, message: str) -> None:
    tied = replace(trace_job("a"), cluster="west")
    with pytest.raises(PolicyError, match=message):
        simulate([tied], lambda state, now: [start], clusters((0.0, 4)))


def test_more_workers_than_a_cluster_has_are_refused_whatever_the_other_one_has_free() -> None:
    with pytest.raises(PolicyError, match="granted 5 workers in the cluster east, and there are 4"):
        simulate([trace_job("a", workers=(1, 8))], lambda state, now: [Start("a", 5, "", "east")], clusters((0.0, 4)))


@pytest.mark.parametrize("every_s", [None, 60.0])
def test_a_policy_that_does_nothing_ends_the_simulation_with_unfinished_jobs(every_s: float | None) -> None:
    run = simulate([trace_job("a")], lambda state, now: [], market(4, every_s=every_s))
    assert run.jobs[0].finished_at is None and run.jobs[0].left == 100


@pytest.mark.parametrize(
    ("grants", "message"),
    [
        ({"a": 4, "b": 4}, "granted 8 workers, and there are 6"),
        ({"a": 5}, "job a was given 5 workers, and may have 2 to 4"),
        ({"a": 1}, "job a was given 1 worker, and may have 2 to 4"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_refused(grants: dict[str, int], message: str) -> None:
    jobs = [trace_job("a", workers=(2, 4)), trace_job("b")]
    with pytest.raises(PolicyError, match=message):
        simulate(jobs, scripted({0: grants}), market(6))


def test_a_decision_on_an_unknown_job_is_refused() -> None:
    with pytest.raises(PolicyError, match="decided on x, which is not in the market"):
        simulate([trace_job("a")], lambda state, now: [Start("x", 1, "")], market(4))


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
