"""The cases of the benchmark: which trace on which cluster, with which costs, projects, priorities and capacity."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal_service.core.scheduling.market import Project
from shoal_service.simulator.engine import Costs, Market
from shoal_service.simulator.traces import Capacity, TraceJob, read_capacity, read_trace

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "traces"
WORKERS = {"philly-1": 32, "philly-2": 32, "saturn-1": 32, "newtrace-1": 64}
"""The clusters of the yardstick: 4 workers a node."""
WORKERS_PER_NODE = 4
EXAMPLE, EXAMPLE_WORKERS = "trace", 16
PUBLISHED_TRACES = tuple(WORKERS)

ONE_SECOND = Costs(switch_s=1.0, start_s=1.0)
SHOAL = Costs()
RESTART = Costs(use_restart_s=True)
URGENT = 50
PROJECTS = "three projects with quotas"
PRIORITIES = "one job of eight with priority 50"
SPOT = "spot-p2 capacity"
_SEED = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation of each policy."""

    trace: str
    words: str
    jobs: tuple[TraceJob, ...]
    market: Market
    urgent: frozenset[str] = field(default_factory=frozenset)
    """Jobs with a high priority."""


def traces(folder: Path) -> tuple[Path, dict[str, int]]:
    """The folder, and the workers for each trace in it; the repository's own trace if the folder is not there."""
    if folder.is_dir():
        return folder, WORKERS
    return ROOT / "examples", {EXAMPLE: EXAMPLE_WORKERS}


def example() -> Case:
    """The trace that is shipped with Shoal, as `shoal simulate` plays it."""
    return plain(ROOT / "examples", EXAMPLE, EXAMPLE_WORKERS, SHOAL)


def plain(folder: Path, trace: str, workers: int, costs: Costs) -> Case:
    capacity = Capacity.constant(workers // WORKERS_PER_NODE, WORKERS_PER_NODE)
    jobs = read_trace(folder / f"{trace}.csv").jobs
    return Case(trace, "", jobs, Market(capacity=capacity, costs=costs))


def with_projects(case: Case) -> Case:
    """The case with three projects: half of the jobs are of `research`, which weighs twice; `batch` has a limit."""
    workers = case.market.capacity.workers(0)
    projects = {
        "research": Project(name="research", weight=2, guaranteed=workers // 4),
        "product": Project(name="product", guaranteed=workers // 4),
        "batch": Project(name="batch", limit=workers // 2),
    }
    draw = random.Random(_SEED)
    jobs = tuple(replace(job, project=draw.choices(list(projects), (2, 1, 1))[0]) for job in case.jobs)
    market = replace(case.market, projects=projects)
    return Case(case.trace, PROJECTS, jobs, market)


def with_priorities(case: Case) -> Case:
    """The case in which one job of eight is urgent."""
    draw = random.Random(_SEED)
    jobs = tuple(replace(job, priority=URGENT if draw.random() < 1 / 8 else 0) for job in case.jobs)
    urgent = frozenset(job.job_id for job in jobs if job.priority)
    return Case(case.trace, PRIORITIES, jobs, case.market, urgent)


def on_spot(case: Case, folder: Path) -> Case:
    """The nodes of the capacity trace (0 to 16). All 16 have as many workers as the cluster of the plain case."""
    spot = folder / "spot-p2.csv"
    nodes = max(number for _, number in read_capacity(spot, 1).steps)
    capacity = read_capacity(spot, case.market.capacity.workers(0) // nodes)
    return replace(case, words=SPOT, market=replace(case.market, capacity=capacity))
