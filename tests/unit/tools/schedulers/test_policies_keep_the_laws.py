"""What holds for every policy on every trace: work is conserved, no worker is used twice, no job beats its curve."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers import POLICIES
from shoal_service.core.scheduling.market import Project, ThroughputCurve
from shoal_service.simulator.engine import Costs, JobRun, Market, SimulationResult
from shoal_service.simulator.metrics import measure
from shoal_service.simulator.traces import AWAY, Capacity, TraceJob

_PROJECTS = {
    "a": Project(name="a", weight=2, guaranteed=3),
    "b": Project(name="b", limit=6),
    "c": Project(name="c"),
}


@st.composite
def _jobs(draw: st.DrawFn) -> list[TraceJob]:
    jobs = []
    for number in range(draw(st.integers(1, 8))):
        least = draw(st.integers(1, 3))
        most = draw(st.integers(least, 6))
        steps = draw(st.lists(st.floats(0, 5), min_size=most - 1, max_size=most - 1))
        rates = [1.0 + sum(steps[:size]) for size in range(most)]
        job = TraceJob(
            job_id=f"job-{number}",
            submit_s=draw(st.floats(0, 200)),
            work=draw(st.floats(1, 1000)),
            min_workers=least,
            max_workers=most,
            asked_workers=draw(st.integers(least, most)),
            curve=ThroughputCurve(tuple(range(1, most + 1)), tuple(rates)),
            restart_s=draw(st.none() | st.floats(0, 60)),
            project=draw(st.sampled_from(sorted(_PROJECTS))),
            priority=draw(st.sampled_from((0, 0, 50))),
        )
        jobs.append(job)
    return jobs


_NAMES = st.sampled_from(sorted(POLICIES))
_CAPACITIES = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 4)), max_size=4, unique_by=lambda step: step[0]
).map(lambda steps: Capacity(3, ((0.0, 3), *sorted(steps), (400.0, 3))))
_COSTS = st.builds(Costs, switch_s=st.floats(0, 5), start_s=st.floats(0, 20), use_restart_s=st.booleans())


@settings(max_examples=100)
@given(name=_NAMES, use_rules=st.booleans(), jobs=_jobs(), capacity=_CAPACITIES, costs=_COSTS)
def test_every_policy_keeps_the_laws(
    name: str, use_rules: bool, jobs: list[TraceJob], capacity: Capacity, costs: Costs
) -> None:
    market = Market(capacity=capacity, costs=costs, projects=_PROJECTS if use_rules else {})
    run = POLICIES[name].run(jobs, market, use_rules=use_rules)
    for job in run.jobs:
        assert job.finished_at is not None, f"{job.job.job_id} starves"
        assert _trained(job) == pytest.approx(job.job.work, rel=1e-6, abs=1e-3)
        sizes = range(job.job.min_workers, job.job.max_workers + 1)
        fastest_rate = max(map(job.job.curve.rate, sizes))
        assert job.finished_at - job.job.submit_s >= job.job.work / fastest_rate - 1e-5
        assert all(workers <= job.job.max_workers for _, workers in job.history)
    assert _most_overbooked(run, capacity) <= 0
    if use_rules and name != "first-come":
        assert _most_in_use(run, "b") <= 6
    assert measure(run, market).utilisation <= 1 + 1e-9


def _steps(most: int) -> st.SearchStrategy[list[tuple[float, int]]]:
    """Nodes over time of a cluster that is lost now and then, and is there in the end."""
    later = st.lists(st.tuples(st.floats(1, 300), st.integers(AWAY, most)), max_size=3, unique_by=lambda step: step[0])
    return later.map(lambda steps: [(0.0, most), *sorted(steps), (400.0, most)])


@settings(max_examples=100)
@given(
    name=_NAMES,
    jobs=_jobs(),
    east=_steps(2),
    west=_steps(3),
    ties=st.lists(st.sampled_from(["", "", "east", "west"]), min_size=8, max_size=8),
    wait_s=st.floats(0, 300),
    costs=_COSTS,
)
def test_every_policy_keeps_the_laws_in_several_clusters(
    name: str,
    jobs: list[TraceJob],
    east: list[tuple[float, int]],
    west: list[tuple[float, int]],
    ties: list[str],
    wait_s: float,
    costs: Costs,
) -> None:
    """The engine refuses a job that would span them."""
    jobs = [replace(job, cluster=tie, wait_s=wait_s) for job, tie in zip(jobs, ties, strict=False)]
    capacity = Capacity.of_clusters({"east": east, "west": west}, 3)
    run = POLICIES[name].run(jobs, Market(capacity=capacity, costs=costs, projects=_PROJECTS), use_rules=True)
    for job in run.jobs:
        assert job.finished_at is not None, f"{job.job.job_id} starves"
        assert _trained(job) == pytest.approx(job.job.work, rel=1e-6, abs=1e-3)
        assert {place for _, place in job.cluster_starts} <= (
            {job.job.cluster} if job.job.cluster else {"east", "west"}
        )
    assert _most_overbooked(run, capacity) <= 0
    if name != "first-come":
        assert _most_in_use(run, "b") <= 6


def _trained(run: JobRun) -> float:
    """Samples, from the workers over time alone: the costs are added up again, independently of the engine."""
    samples, ready_at = 0.0, 0.0
    held = 0
    for (at, workers), (until, _) in zip(run.history, run.history[1:], strict=False):
        ready_at = max(ready_at, at + (run.switch_s if held else run.start_s)) if workers else at
        held = workers
        if workers >= run.job.min_workers:
            samples += run.job.curve.rate(workers) * max(0.0, until - max(at, ready_at))
    return samples


def _most_overbooked(run: SimulationResult, capacity: Capacity) -> int:
    """Workers in use less those that are there, at the worst moment."""
    times = {at for job in run.jobs for at, _ in job.history} | {at for at, _ in capacity.steps}
    there = {at: max(step for step in capacity.steps if step[0] <= at)[1] * capacity.workers_per_node for at in times}
    return max(_in_use(run.jobs, at) - there[at] for at in times)


def _most_in_use(run: SimulationResult, project: str) -> int:
    jobs = [job for job in run.jobs if job.job.project == project]
    return max((_in_use(jobs, at) for job in jobs for at, _ in job.history), default=0)


def _in_use(jobs: Sequence[JobRun], at: float) -> int:
    """The workers of these jobs from this time on."""
    return sum(next((held for since, held in reversed(job.history) if since <= at), 0) for job in jobs)
