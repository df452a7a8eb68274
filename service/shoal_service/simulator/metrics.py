"""What a simulation is judged by: completion times, fairness, utilisation, goodput, moves. Called after the engine.

JCT          job completion time: from submission to the last sample
finish-time  JCT / what the job would take alone on its fair share: the workers of each moment, divided among the
ratio        projects that have jobs by weight, and within a project equally among its unfinished jobs
fairness     Jain's index of these ratios, (sum)^2 / (n * sum of squares): 1 if all jobs are slowed down alike
utilisation  worker-seconds held / worker-seconds of the nodes, from the first submission to the last end
goodput      worker-seconds of training / worker-seconds held
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal_service.core.scheduling.market import Project
from shoal_service.simulator.engine import JobRun, Market, SimulationResult
from shoal_service.simulator.traces import Capacity

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a policy achieved for the jobs that finished; NaN where none did."""

    num_jobs: int
    num_unfinished: int
    """Jobs that would wait for ever: the policy gives them no workers although nothing else is going to happen."""
    mean_jct_h: float
    median_jct_h: float
    p99_jct_h: float
    makespan_h: float
    fairness: float
    project_fairness: float
    """The same of the projects' mean ratios."""
    utilisation: float
    goodput: float
    num_moves: int
    """Changes of the number of workers of jobs that kept training."""
    num_preemptions: int
    num_losses: int
    """How often a job returned to the queue because its cluster was lost."""
    mean_wait_s: float
    """Mean time from submission to the first workers."""


def measure(run: SimulationResult, market: Market) -> Metrics:
    finished = [job for job in run.jobs if job.finished_at is not None]
    jct_h = [(_end(job) - job.job.submit_s) / _HOUR_S for job in finished]
    ratios = finish_time_ratios(run, market)
    by_project = defaultdict(list)
    for job in finished:
        by_project[job.job.project].append(ratios[job.job.job_id])
    start_s = min(job.job.submit_s for job in run.jobs)
    held_s = sum(job.served_s for job in run.jobs)
    waits_s = [job.started_at - job.job.submit_s for job in run.jobs if job.started_at is not None]
    return Metrics(
        num_jobs=len(run.jobs),
        num_unfinished=len(run.jobs) - len(finished),
        mean_jct_h=_average(jct_h),
        median_jct_h=statistics.median(jct_h) if jct_h else math.nan,
        p99_jct_h=percentile(jct_h, 0.99),
        makespan_h=(max(map(_end, finished)) - start_s) / _HOUR_S if finished else math.nan,
        fairness=jain([ratios[job.job.job_id] for job in finished]),
        project_fairness=jain([statistics.mean(of) for of in by_project.values()]),
        utilisation=_divide(held_s, market.capacity.worker_seconds(start_s, run.ended_at)),
        goodput=_divide(sum(job.trained_s for job in run.jobs), held_s),
        num_moves=sum(job.num_moves for job in run.jobs),
        num_preemptions=sum(job.num_preemptions for job in run.jobs),
        num_losses=sum(job.num_losses for job in run.jobs),
        mean_wait_s=_average(waits_s),
    )


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: 1 if all are equal, 1/n if one has everything; NaN of nothing."""
    return _divide(sum(values) ** 2, len(values) * sum(value * value for value in values))


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between two values, as numpy's default; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    low, part = divmod(share * (len(ordered) - 1), 1.0)
    high = min(int(low) + 1, len(ordered) - 1)
    return ordered[int(low)] * (1 - part) + ordered[high] * part


def finish_time_ratios(run: SimulationResult, market: Market) -> dict[str, float]:
    """The ratio of each job that finished, by job. The fair share of a job is averaged over its life, as in Themis
    (NSDI 2020)."""
    finished = [job for job in run.jobs if job.finished_at is not None]
    shares = _FairShares(run, market.capacity, market.projects)
    ratios: dict[str, float] = {}
    for job in finished:
        jct_s = _end(job) - job.job.submit_s
        alone_s = job.job.work / _find_rate_alone(job, shares.mean(job))
        ratios[job.job.job_id] = jct_s / alone_s
    return ratios


def _find_rate_alone(run: JobRun, share: float) -> float:
    """The rate of a job with a share that need not be whole; below the minimum the job takes turns."""
    job = run.job
    if share < job.min_workers:
        return job.curve.rate(job.min_workers) * share / job.min_workers
    share = min(share, job.max_workers)
    low = math.floor(share)
    part = share - low
    return job.curve.rate(low) * (1 - part) + job.curve.rate(math.ceil(share)) * part


class _FairShares:
    """The integral over time of the workers that a job of each project is due."""

    def __init__(self, run: SimulationResult, capacity: Capacity, projects: Mapping[str, Project]) -> None:
        changes: list[tuple[float, str, int]] = []
        for job in run.jobs:
            changes += [(job.job.submit_s, job.job.project, 1)]
            changes += [(_end(job), job.job.project, -1)] if job.finished_at is not None else []
        self._times = [0.0]
        self._due_s: dict[str, list[float]] = {job.job.project: [0.0] for job in run.jobs}
        present = dict.fromkeys(self._due_s, 0)
        weights = {name: projects[name].weight if name in projects else 1.0 for name in self._due_s}
        for at, project, change in sorted(changes):
            self._advance(at, present, weights, capacity)
            present[project] += change

    def mean(self, run: JobRun) -> float:
        due_s = self._due_s[run.job.project]
        start_s, end_s = run.job.submit_s, _end(run)
        if end_s <= start_s:
            return float(run.job.max_workers)
        return (self._at(due_s, end_s) - self._at(due_s, start_s)) / (end_s - start_s)

    def _advance(self, at: float, present: Mapping[str, int], weights: Mapping[str, float], capacity: Capacity) -> None:
        worker_s = capacity.worker_seconds(self._times[-1], at)
        weight = sum(weights[name] for name, jobs in present.items() if jobs)
        self._times.append(at)
        for name, due_s in self._due_s.items():
            jobs = present[name]
            due_s.append(due_s[-1] + (worker_s * weights[name] / weight / jobs if jobs else 0.0))

    def _at(self, due_s: Sequence[float], at: float) -> float:
        """`at` is one of the times."""
        return due_s[bisect_right(self._times, at) - 1]


def _end(run: JobRun) -> float:
    assert run.finished_at is not None
    return run.finished_at


def _average(values: Iterable[float]) -> float:
    values = list(values)
    return statistics.mean(values) if values else math.nan


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
