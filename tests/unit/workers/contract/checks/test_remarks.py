from __future__ import annotations

from typing import Any

import pytest

from shoal_workers.contract.checks.remarks import capacity_remark, remarks
from shoal_workers.contract.spec import JobSpec


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"stop": {"steps": 100}, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"schedule": {"warmup_steps": 100}}, []),
        ({"schedule": {"warmup_steps": 101}}, ["schedule.warmup_steps 101 is more than stop.steps 100"]),
        ({"schedule": {"warmup_steps": 101}, "stop": {"epochs": 1}}, []),
        ({"checkpoint": {"every_steps": None, "every_s": 60}}, []),
        ({"checkpoint": {"every_steps": None}}, ["checkpoint.every_steps and checkpoint.every_s are both null"]),
    ],
)
def test_what_is_probably_not_meant_is_said(changes: dict[str, Any], expected: list[str]) -> None:
    found = list(remarks(spec(**changes)))
    assert len(found) == len(expected)
    assert all(remark.startswith(words) for remark, words in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("worker", "nodes", "room"),
    [
        ({}, [(4.0, 0.0)], 4),
        ({"cpus": 1.5}, [(4.0, 0.0), (1.0, 0.0), (3.0, 0.0)], 4),
        ({"gpus": 1}, [(64.0, 2.0), (1.0, 8.0), (64.0, 0.0)], 3),
        ({"cpus": 0.5}, [(4.0, 0.0)], None),
        ({"cpus": 0}, [], None),
        ({}, [(4.0, 0.0), (4.0, 0.0)], None),
    ],
)
def test_more_workers_than_the_cluster_has_room_for_are_remarked(
    worker: dict[str, Any], nodes: list[tuple[float, float]], room: int | None
) -> None:
    remark = capacity_remark(spec(worker=worker, elasticity={"max_workers": 8}), nodes)
    if room is None:
        assert remark == ""
    else:
        assert f"elasticity.max_workers is 8, and the cluster has room for {room} workers with" in remark
