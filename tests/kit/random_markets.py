"""Random markets for the invariants of decisions: running jobs, arriving ones, quotas, limits and unequal nodes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from kit.market import NOW, carried_out, market
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import (
    MarketJob,
    MarketNode,
    MarketState,
    Project,
    ThroughputCurve,
    User,
    WorkerNeed,
)
from shoal_workers.contract.placing import CapacityKind, Placement

NEEDS = [WorkerNeed(cpus=1.0), WorkerNeed(cpus=2.0), WorkerNeed(cpus=1.0, gpus=1.0)]
PROJECTS = ["a", "b", "a-1", "a-2", "unlisted"]


def markets() -> st.SearchStrategy[MarketState]:
    """From a seed: drawn value by value, most markets would be empty or copies of each other, and show nothing."""
    return st.integers(0, 2**32 - 1).map(lambda seed: random_market(Random(seed)))


def random_market(draw: Random) -> MarketState:
    """Some jobs run already, then others arrive and the rest of their life has changed."""
    cluster = [_node(draw, f"node-{at}") for at in range(draw.randint(1, 4))]
    jobs = [_job(draw, f"job-{at}") for at in range(draw.randint(1, 9))]
    state = market(jobs, cluster, *_quotas(draw), users=_limits(draw))
    now = _placed(carried_out(state, decide(state, NOW - 100), NOW - 100))
    newcomers = [_job(draw, f"new-{at}") for at in range(draw.randint(0, 5))]
    old = [replace(one, is_leaving=draw.random() < 0.25 and one.granted > 0) for one in now.jobs]
    return replace(now, jobs=[*old, *newcomers])


def clustered_markets() -> st.SearchStrategy[MarketState]:
    """Markets with two or three clusters."""
    return st.integers(0, 2**32 - 1).map(lambda seed: random_clusters(Random(seed)))


def random_clusters(draw: Random) -> MarketState:
    """As a random market. Some jobs are tied to a cluster, which need not be there, or may not start in another one."""
    names = ["east", "north", "west"][: draw.randint(2, 3)]
    cluster = [replace(_node(draw, f"{name}-{at}"), cluster=name) for name in names for at in range(draw.randint(1, 3))]
    jobs = [_somewhere(draw, _job(draw, f"job-{at}"), names) for at in range(draw.randint(1, 12))]
    state = market(jobs, cluster, *_quotas(draw), users=_limits(draw))
    now = _placed(carried_out(state, decide(state, NOW - 100), NOW - 100))
    newcomers = [_somewhere(draw, _job(draw, f"new-{at}"), names) for at in range(draw.randint(0, 6))]
    old = [replace(one, is_leaving=draw.random() < 0.25 and one.granted > 0) for one in now.jobs]
    return replace(now, jobs=[*old, *newcomers])


def _somewhere(draw: Random, job: MarketJob, names: list[str]) -> MarketJob:
    excluded = frozenset(draw.sample(names, 1)) if draw.random() < 0.2 else frozenset[str]()
    tied = draw.choice([*names, "away"]) if draw.random() < 0.3 else ""
    name = f"{job.job_id}@{tied}" if tied else job.job_id
    return replace(job, job_id=name, cluster=tied, excluded_clusters=excluded)


def _placed(state: MarketState) -> MarketState:
    """With the nodes of new workers, which a running cluster knows; a job that finds no place is queued again."""
    free = {node.node_id: [node.cpus, node.gpus] for node in state.nodes}
    found = {job.job_id: job for job in state.jobs}
    new = [job for job in state.jobs if sum(job.on_nodes.values()) != job.granted]
    for job in state.jobs:
        if job not in new:
            _take(free, job, job.on_nodes)
    for job in sorted(new, key=lambda one: sum(may_use(one, node) for node in state.nodes)):
        places: Counter[str] = Counter()
        for node in state.nodes:
            cpus, gpus = free[node.node_id]
            room = min([cpus // job.need.cpus, *([gpus // job.need.gpus] if job.need.gpus else [])])
            if may_use(job, node) and room > 0:
                places[node.node_id] = min(int(room), job.granted - places.total())
        fits = places.total() == job.granted
        tied = job.job_id.partition("@")[2]
        found[job.job_id] = (
            replace(job, on_nodes=dict(places)) if fits else replace(job, granted=0, held=0, cluster=tied)
        )
        _take(free, job, places if fits else {})
    return replace(state, jobs=[found[job.job_id] for job in state.jobs])


def _take(free: dict[str, list[float]], job: MarketJob, places: Mapping[str, int]) -> None:
    for name, workers in places.items():
        free[name] = [free[name][0] - workers * job.need.cpus, free[name][1] - workers * job.need.gpus]


def may_use(job: MarketJob, node: MarketNode) -> bool:
    """A queued job that may start in any cluster: alone, or beside other nodes of this one."""
    if job.cluster not in ("", node.cluster) or (not job.granted and node.cluster in job.excluded_clusters):
        return False
    return (job.capacity is CapacityKind.ANY or node.is_spot == (job.capacity is CapacityKind.SPOT)) and all(
        node.labels.get(key) == value for key, value in job.selector.items()
    )


def of_one_kind(state: MarketState) -> MarketState:
    jobs = [replace(one, need=NEEDS[0], capacity=CapacityKind.ANY, selector={}, on_nodes={}) for one in state.jobs]
    return replace(state, jobs=jobs, nodes=[replace(one, is_cordoned=False) for one in state.nodes])


def _curve(draw: Random) -> ThroughputCurve:
    rates = [draw.uniform(1.0, 100.0) for _ in range(draw.randint(1, 4))]
    return ThroughputCurve(tuple(2**at for at in range(len(rates))), tuple(rates))


def _job(draw: Random, name: str) -> MarketJob:
    least = draw.randint(1, 4)
    return MarketJob(
        job_id=name,
        submitted_at=NOW - draw.uniform(0, 10_000),
        min_workers=least,
        max_workers=draw.randint(least, 8),
        need=draw.choices(NEEDS, (6, 2, 1))[0],
        project=draw.choice(PROJECTS),
        user=draw.choice(["", "u", "v"]),
        priority=draw.choice([-10, 0, 0, 0, 50]),
        curve=_curve(draw),
        left=draw.choice([None, 10 ** draw.uniform(-1, 6)]),
        served_s=draw.uniform(0, 1e5),
        switch_s=draw.choice([0.3, 3.0, 60.0]),
        moved_at=draw.choice([None, NOW - draw.uniform(0, 300)]),
        finish_by=draw.choice([None, None, NOW + draw.uniform(-100, 10_000)]),
        capacity=draw.choices(list(CapacityKind), [4 if kind is CapacityKind.ANY else 1 for kind in CapacityKind])[0],
        selector=draw.choice([{}, {}, {}, {"zone": "x"}]),
        placement=draw.choice(list(Placement)),
    )


def _node(draw: Random, name: str) -> MarketNode:
    return MarketNode(
        node_id=name,
        cpus=draw.randint(1, 6),
        gpus=draw.randint(0, 2),
        labels=draw.choice([{}, {"zone": "x"}]),
        is_spot=draw.random() < 0.5,
        is_cordoned=draw.random() < 0.2,
    )


def _quotas(draw: Random) -> list[Project]:
    def project(name: str, parent: str | None = None) -> Project:
        return Project(
            name=name,
            parent=parent,
            weight=draw.choice([0.5, 1.0, 3.0]),
            guaranteed=draw.randint(0, 4),
            limit=draw.choice([None, draw.randint(0, 12)]),
            max_running=draw.choice([None, draw.randint(0, 3)]),
        )

    return [project("a"), project("b"), project("a-1", "a"), project("a-2", "a")]


def _limits(draw: Random) -> dict[str, User]:
    return {
        name: User(name=name, max_running=draw.choice([None, draw.randint(1, 3)]))
        for name in ("default", "u")
        if draw.random() < 0.5
    }
