"""How long one decision takes on a large cluster: 10,000 jobs, 1,000 nodes of 8 workers, three projects."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal_service.collector import paused_collector
from shoal_service.core.scheduling.market import (
    Decision,
    MarketJob,
    MarketNode,
    MarketState,
    Policy,
    Preempt,
    Project,
    Resize,
    Start,
    ThroughputCurve,
    WorkerNeed,
)

NUM_JOBS, NUM_NODES, WORKERS_PER_NODE = 10_000, 1_000, 8
LIMIT_S = 0.1
_NOW = 1_000_000.0
_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call by the clock, with the garbage collector paused; the median of the trials."""

    words: str
    seconds: float
    num_decisions: int
    """Number of decisions, without those that only say that a job waits."""


def measure_speed(policy: Policy, trials: int) -> list[Timing]:
    empty = large_market(NUM_JOBS, NUM_NODES)
    steady = apply(empty, policy(empty, _NOW), _NOW)
    for _ in range(10):  # the first decisions start jobs, and those after them still move workers
        steady = apply(steady, policy(steady, _NOW + 60), _NOW + 60)
    ended = replace(steady, jobs=[job for job in steady.jobs if job.job_id != _first_running(steady)])
    newcomer = replace(_job(random.Random(0), NUM_JOBS), submitted_at=_NOW, priority=50)
    urgent = replace(steady, jobs=[*steady.jobs[:-1], newcomer])
    shrunk = replace(steady, nodes=steady.nodes[:-10])
    trained = replace(steady, jobs=[replace(job, left=0.99 * (job.left or 0.0)) for job in steady.jobs])
    return [
        _time("all jobs queued, all nodes free", policy, empty, trials, is_new=True),
        _time("nothing has changed", policy, steady, trials),
        _time("every job has changed", policy, trained, trials, is_new=True),
        _time("a job has ended", policy, ended, trials),
        _time("an urgent job comes", policy, urgent, trials),
        _time("10 nodes are lost", policy, shrunk, trials),
    ]


def large_market(num_jobs: int, num_nodes: int) -> MarketState:
    """A market that is drawn from a fixed seed: a third of the jobs would fill the cluster."""
    draw = random.Random(16)
    jobs = [_job(draw, number) for number in range(num_jobs)]
    size = float(WORKERS_PER_NODE)
    nodes = [MarketNode(node_id=f"n{at:04d}", cpus=size, gpus=size, memory_gib=1024.0) for at in range(num_nodes)]
    projects = {
        "research": Project(name="research", weight=2, guaranteed=num_nodes * 2),
        "product": Project(name="product", guaranteed=num_nodes * 2),
        "batch": Project(name="batch", limit=num_nodes * 4),
    }
    return MarketState(jobs=jobs, nodes=nodes, projects=projects)


def apply(state: MarketState, decisions: Sequence[Decision], now: float) -> MarketState:
    """The market after its decisions were carried out."""
    granted: dict[str, int] = {}
    for decision in decisions:
        match decision:
            case Start(job_id=job_id, workers=workers) | Resize(job_id=job_id, workers=workers):
                granted[job_id] = workers
            case Preempt(job_id=job_id):
                granted[job_id] = 0
    jobs = [
        replace(job, granted=granted[job.job_id], held=granted[job.job_id], moved_at=now)
        if job.job_id in granted
        else job
        for job in state.jobs
    ]
    return replace(state, jobs=jobs)


def _job(draw: random.Random, number: int) -> MarketJob:
    serial = draw.choice((0.02, 0.06, 0.15))
    most = draw.choice((4, 8, 16))
    work = draw.lognormvariate(8, 1.5)
    return MarketJob(
        job_id=f"job-{number:05d}",
        submitted_at=_NOW - draw.uniform(0, 100_000),
        min_workers=draw.choice((1, 1, 1, 2, 4)),
        max_workers=most,
        need=draw.choice((WorkerNeed(cpus=1, gpus=1, memory_gib=16), WorkerNeed(cpus=1, memory_gib=8))),
        project=draw.choices(("research", "product", "batch"), (2, 1, 1))[0],
        priority=draw.choice((0, 0, 0, 10, 50)),
        curve=ThroughputCurve(_SIZES, tuple(1 / (serial + (1 - serial) / size) for size in _SIZES)),
        left=work,
        done=work * draw.random(),
    )


def _first_running(state: MarketState) -> str:
    return next(job.job_id for job in state.jobs if job.granted)


def _time(words: str, policy: Policy, state: MarketState, trials: int, *, is_new: bool = False) -> Timing:
    """`is_new`: no job is the same value as in the decision before, so nothing that was derived from it is known."""
    seconds = []
    found: Sequence[Decision] = ()
    for _ in range(trials):
        fresh = replace(state, jobs=[replace(job) for job in state.jobs]) if is_new else state
        start = time.perf_counter()
        with paused_collector():  # as the control loop does
            found = policy(fresh, _NOW + 120)
        seconds.append(time.perf_counter() - start)
    changes = sum(isinstance(decision, Start | Resize | Preempt) for decision in found)
    return Timing(words, statistics.median(seconds), changes)
