"""Jobs whose workers cannot be replaced when they must leave a node: no drain waits for what cannot come."""

from dataclasses import replace
from typing import Any

import pytest

from shoal_service.control.market.outlook import find_cramped_jobs
from shoal_service.core.desired import Desired
from shoal_service.core.scheduling.market import MarketNode
from shoal_service.store.driving import DriveRow
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState


def row(name: str, workers: int, *, priority: int = 0, **spec: Any) -> DriveRow:
    document = {
        "data": {"corpus": "python-stdlib"},
        "stop": {"steps": 100},
        "batch": {"global_size": 8, "micro_size": 1},
        "elasticity": {"min_workers": 1, "max_workers": 4},
        **spec,
    }
    return DriveRow(
        id=name,
        spec=parse_spec(document),
        spec_version=1,
        state=JobState.RUNNING,
        desired=Desired.RUN,
        attempt=1,
        granted_workers=workers,
        pulled_seq=0,
        created_at=5.0,
        priority=priority,
        status=JobStatus(state=JobState.RUNNING),
    )


def node(name: str, cpus: float = 2.0, **more: Any) -> MarketNode:
    return MarketNode(node_id=name, cpus=cpus, memory_gib=64.0, **more)


def cramped(rows: list[DriveRow], nodes: list[MarketNode], **workers: dict[str, int]) -> frozenset[str]:
    return find_cramped_jobs(rows, nodes, workers)


def test_a_job_whose_missing_worker_fits_has_room() -> None:
    job = row("a", 2)
    assert cramped([job], [node("n1", 1.0), node("n2", 1.0)], a={"n1": 1, "drained": 1}) == frozenset()
    assert cramped([job], [node("n1", 1.0)], a={"n1": 1, "drained": 1}) == {"a"}


@pytest.mark.parametrize(
    ("spec", "other", "allowed"),
    [
        ({"worker": {"selector": {"zone": "a"}}}, {"labels": {"zone": "b"}}, {"labels": {"zone": "a"}}),
        (
            {"worker": {"gpus": 1, "gpu_type": "H100"}},
            {"gpus": 1.0, "labels": {"ray.io/accelerator-type": "A100"}},
            {"gpus": 1.0, "labels": {"ray.io/accelerator-type": "H100"}},
        ),
        ({"capacity": "on_demand"}, {"is_spot": True}, {"is_spot": False}),
        ({"capacity": "spot"}, {"is_spot": False}, {"is_spot": True}),
        ({}, {"is_cordoned": True}, {}),
    ],
    ids=["selector", "gpu_type", "on_demand", "spot", "cordoned"],
)
def test_a_node_that_the_job_may_not_use_is_no_room(spec: Any, other: Any, allowed: Any) -> None:
    job = row("a", 1, **spec)
    assert cramped([job], [node("n1", **other)], a={"drained": 1}) == {"a"}
    assert cramped([job], [node("n1", **allowed)], a={"drained": 1}) == frozenset()


def test_workers_on_a_cordoned_node_stay() -> None:
    assert cramped([row("a", 2)], [node("n1", is_cordoned=True)], a={"n1": 2}) == frozenset()


def test_workers_that_stay_keep_their_places_from_jobs_of_higher_priority() -> None:
    first, second = row("a", 2, priority=9), row("b", 1)
    assert cramped([first, second], [node("n1", 1.0), node("n2", 1.0)], a={"n1": 1, "x": 1}, b={"n2": 1}) == {"a"}


def test_a_higher_priority_gets_the_last_place() -> None:
    rows = [row("a", 1), row("b", 1, priority=1)]
    assert cramped(rows, [node("n1", 1.0)], a={"x": 1}, b={"x": 1}) == {"a"}


def test_room_in_another_cluster_is_none() -> None:
    job = replace(row("a", 2), cluster="east")
    full = node("n1", 1.0, cluster="east")
    assert cramped([job], [full, node("n2", cluster="west")], a={"n1": 1, "drained": 1}) == {"a"}
    assert cramped([job], [full, node("n2", cluster="east")], a={"n1": 1, "drained": 1}) == frozenset()
