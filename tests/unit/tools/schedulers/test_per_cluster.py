"""Clusters around a policy that knows one, worked out by hand."""

from typing import Any

from schedulers import first_come, max_min, per_cluster, with_rules
from shoal_service.core.scheduling.market import Decision, MarketJob, MarketNode, MarketState, Project, Start, Wait
from shoal_service.simulator.traces import WORKER

EAST, WEST = (MarketNode(node_id=name, cpus=4.0, cluster=name) for name in ("east", "west"))


def _job(name: str, least: int = 1, most: int = 8, **fields: Any) -> MarketJob:
    return MarketJob(
        job_id=name, submitted_at=float(ord(name[0])), min_workers=least, max_workers=most, need=WORKER, **fields
    )


def _starts(decisions: list[Decision]) -> dict[str, tuple[str, int]]:
    return {one.job_id: (one.cluster, one.workers) for one in decisions if isinstance(one, Start)}


def test_jobs_are_put_where_the_most_workers_are_left_and_get_no_more_than_are_there() -> None:
    state = MarketState(jobs=[_job("a", 2), _job("b"), _job("c", cluster="east")], nodes=[EAST, WEST])
    assert _starts(list(per_cluster(max_min)(state, 0.0))) == {"a": ("east", 2), "b": ("west", 4), "c": ("east", 2)}


def test_a_job_that_is_tied_to_a_cluster_without_nodes_waits_and_a_lost_one_is_left_alone() -> None:
    lost = _job("lost", granted=3, cluster="north", is_leaving=True)
    state = MarketState(jobs=[_job("a", cluster="north"), lost, _job("b", 5, 5)], nodes=[EAST])
    decisions = per_cluster(first_come)(state, 0.0)
    assert [(one.job_id, one.position) for one in decisions if isinstance(one, Wait)] == [("b", 1), ("a", 2)]
    assert len(decisions) == 2


def test_the_limit_of_a_project_holds_over_all_clusters() -> None:
    jobs = [_job("a", project="p"), _job("b", project="p"), _job("c", granted=1, project="p", cluster="west")]
    state = MarketState(jobs=jobs, nodes=[EAST, WEST], projects={"p": Project(name="p", limit=6)})
    granted = {"c": 1}
    for one in per_cluster(with_rules(max_min))(state, 0.0):
        if not isinstance(one, Wait):
            granted[one.job_id] = getattr(one, "workers", 0)
    assert sum(granted.values()) == 6
