"""Generated markets: clusters and streams of jobs drawn from a seed, so that the policy is not fitted to a few traces.

| drawn | from |
|---|---|
| cluster | 4 to 16 nodes of 2, 4 or 8 workers, 12 to 64 workers in all |
| load | 0.5 to 1.6: work at one worker each, over the workers' time until the last submission |
| work | lognormal; the median is 10 minutes to 2 hours of one worker, sigma 0.6 to 1.8 |
| arrivals | a Poisson process; in one market of three, bursts |
| curves | Amdahl's law with a serial part of at most 3 to 25 %; in half of the markets also a cost per worker |
| sizes | `min_workers` 1, or up to 4 for up to half of the jobs; `max_workers` up to half of the cluster |
| projects | in half of the markets two to four, with weights, guarantees and some limits |
| priorities | in one market of three, up to a quarter of the jobs has priority 50 |
| spot | in one market of three, nodes leave and return |
| costs | a change of size 0.15 to 1.5 s, a start 3 to 8 s, as on a machine whose workers are warm or not |

CHOICE_SEEDS are for choosing the policy, TEST_SEEDS for judging it. No test seed may have a part in a choice.
"""

from __future__ import annotations

import math
import random

from schedule.cases import URGENT, Case
from shoal_service.core.scheduling.market import DEFAULT_PROJECT, Project, ThroughputCurve
from shoal_service.simulator.engine import Costs, Market
from shoal_service.simulator.traces import Capacity, TraceJob

TEST_SEEDS = tuple(range(48))
CHOICE_SEEDS = tuple(range(1_000, 1_048))

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def generated(seed: int) -> Case:
    """The market of this seed; the same on every machine."""
    draw = random.Random(seed)
    workers_per_node = draw.choice((2, 4, 8))
    num_nodes = min(64 // workers_per_node, max(-(-12 // workers_per_node), draw.randint(4, 16)))
    workers = num_nodes * workers_per_node
    projects = _projects(draw, workers) if draw.random() < 1 / 2 else {}
    jobs = _jobs(draw, workers, list(projects) or [DEFAULT_PROJECT])
    capacity = Capacity.constant(num_nodes, workers_per_node)
    if draw.random() < 1 / 3:
        capacity = _spot(draw, capacity, jobs[-1].submit_s)
    costs = Costs(switch_s=math.exp(draw.uniform(math.log(0.15), math.log(1.5))), start_s=draw.uniform(3.0, 8.0))
    words = ", ".join(
        [
            f"{workers} workers",
            *(["projects"] if projects else []),
            *(["priorities"] if any(job.priority for job in jobs) else []),
            *(["spot"] if len(capacity.steps) > 1 else []),
        ]
    )
    urgent = frozenset(job.job_id for job in jobs if job.priority)
    return Case(f"market {seed}", words, jobs, Market(capacity=capacity, costs=costs, projects=projects), urgent)


def _jobs(draw: random.Random, workers: int, projects: list[str]) -> tuple[TraceJob, ...]:
    median_s, sigma = math.exp(draw.uniform(math.log(600), math.log(7200))), draw.uniform(0.6, 1.8)
    serial, bend = draw.uniform(0.03, 0.25), draw.choice((0.0, draw.uniform(0.0, 0.02)))
    share_wide, share_urgent = draw.uniform(0, 0.5), draw.choice((0.0, 0.0, draw.uniform(0.02, 0.25)))
    num_jobs = draw.randint(40, 100)
    alone_s = [draw.lognormvariate(math.log(median_s), sigma) for _ in range(num_jobs)]
    span_s = sum(alone_s) / workers / draw.uniform(0.5, 1.6)
    jobs = []
    for number, submit_s in enumerate(_arrivals(draw, num_jobs, span_s)):
        rate = math.exp(draw.uniform(math.log(50), math.log(500)))
        least = draw.randint(2, 4) if draw.random() < share_wide else 1
        most = max(least, min(workers // 2, draw.choice((4, 8, 16, 32))))
        jobs.append(
            TraceJob(
                job_id=f"job-{number:03d}",
                submit_s=submit_s,
                work=alone_s[number] * rate,
                min_workers=least,
                max_workers=most,
                asked_workers=draw.randint(least, most),
                curve=_curve(rate, draw.uniform(0.005, serial), draw.uniform(0, bend), most),
                priority=URGENT if draw.random() < share_urgent else 0,
                project=draw.choice(projects),
            )
        )
    return tuple(jobs)


def _arrivals(draw: random.Random, number: int, span_s: float) -> list[float]:
    """Times of arrival, in order: one at a time, or up to ten within a tenth of the usual distance."""
    mean_s = span_s / number
    if draw.random() >= 1 / 3:
        gaps = [draw.expovariate(1 / mean_s) for _ in range(number)]
    else:
        gaps = []
        while len(gaps) < number:
            burst = draw.randint(1, 10)
            gaps += [draw.expovariate(1 / (mean_s * (0.1 + 0.9 * burst)))]
            gaps += [draw.expovariate(10 / mean_s) for _ in range(burst - 1)]
    at, found = 0.0, []
    for gap in gaps[:number]:
        at += gap
        found.append(at)
    return found


def _curve(rate: float, serial: float, bend: float, most: int) -> ThroughputCurve:
    """A throughput curve in which no larger size is slower: as in a trace, the best rate up to that size."""
    sizes = tuple(size for size in _SIZES if size <= most)
    rates: list[float] = []
    for size in sizes:
        found = rate / (serial + (1 - serial) / size + bend * (size - 1))
        rates.append(max([found, *rates[-1:]]))
    return ThroughputCurve(sizes, tuple(rates))


def _projects(draw: random.Random, workers: int) -> dict[str, Project]:
    """A limit is at least half of the cluster, so that every job can have what it asks for."""
    number = draw.randint(2, 4)
    return {
        f"project-{at}": Project(
            name=f"project-{at}",
            weight=draw.choice((1.0, 1.0, 2.0, 3.0)),
            guaranteed=draw.choice((0, draw.randint(0, workers * 3 // 4 // number))),
            limit=draw.choice((None, None, draw.randint(workers // 2, workers))),
        )
        for at in range(number)
    }


def _spot(draw: random.Random, capacity: Capacity, until_s: float) -> Capacity:
    """Spot capacity: up to two thirds of the nodes leave and return. In the end all are there, so that every job can
    end."""
    nodes = capacity.steps[0][1]
    steps, at = [(0.0, nodes)], 0.0
    while (at := at + draw.expovariate(12 / until_s)) < until_s:
        steps.append((at, draw.randint(max(1, -(-nodes // 3)), nodes)))
    return Capacity(capacity.workers_per_node, (*steps, (max(until_s, at), nodes)))
