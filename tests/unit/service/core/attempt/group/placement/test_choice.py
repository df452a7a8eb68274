"""The workers and the layout of a group on known nodes, from the attempt machine: tp groups do not cross nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal_service.core.attempt import switching
from shoal_service.core.attempt.deadlines import find_wait
from shoal_service.core.attempt.state.parts import Running, Stage
from shoal_service.planner import plan
from shoal_workers.contract.job import EndReason

NewWorld = Callable[..., Any]
TP2 = {"parallelism": {"tp": 2}, "batch": {"global_size": 4, "micro_size": 1}}
LARGE: dict[str, Any] = {
    "model": {"dim": 8192, "num_layers": 16, "num_heads": 16, "seq_len": 2048},
    "batch": {"global_size": 2, "micro_size": 1},
    "worker": {"gpus": 1},
}
"""Eight workers on one node train it as fsdp2 x tp4."""


def trained(world: Any) -> Any:
    world.open(then=1)
    return world


def ranks(world: Any) -> list[tuple[int, str]]:
    """By rank: the worker and its node."""
    return [(worker.index, worker.node_id) for worker in world.group()]


def remarks(world: Any) -> list[str]:
    return [event["remark"] for event in world.events("generation.forming")]


def layouts(world: Any) -> list[str]:
    return [event["layout"] for event in world.events("generation.forming")]


def test_the_first_group_is_dealt_node_by_node(new_world: NewWorld) -> None:
    world = trained(new_world(workers=4, nodes=2, **TP2))
    assert ranks(world) == [(0, "n0"), (2, "n0"), (1, "n1"), (3, "n1")]
    assert layouts(world) == ["fsdp2 x tp2"] and remarks(world) == [""]


def test_a_spare_on_the_survivors_node_takes_the_place_of_a_lost_worker(new_world: NewWorld) -> None:
    world = trained(new_world(workers=4, standby=2, nodes=2, **TP2))
    world.start_all()
    assert {worker.index: worker.node_id for worker in world.workers.values()}[5] == "n1"
    world.lose(1)
    assert ranks(world) == [(0, "n0"), (2, "n0"), (5, "n1"), (3, "n1")], "4 has a lower index, but is on n0"


def test_a_fixed_tp_that_has_to_cross_nodes_is_remarked(new_world: NewWorld) -> None:
    world = trained(new_world(workers=4, nodes=4, **TP2))
    assert [index for index, _ in ranks(world)] == [0, 1, 2, 3]
    expected = "2 of 2 tensor-parallel groups across nodes, because the workers on the nodes fill 0 groups of 2"
    assert remarks(world) == [expected]


@pytest.mark.parametrize(
    ("nodes", "layout"),
    [(1, "fsdp2 x tp4"), (2, "pp2 x tp4"), (4, "pp4 x tp2"), (8, "pp8")],
)
def test_a_planned_tp_is_no_larger_than_the_nodes(new_world: NewWorld, nodes: int, layout: str) -> None:
    world = trained(new_world(workers=8, nodes=nodes, **LARGE))
    assert layouts(world) == [layout] and remarks(world) == [""]
    assert len(world.group()) == 8


BIG: dict[str, Any] = {"model": {"dim": 1024, "num_layers": 8, "num_heads": 8}, "worker": {"cpus": 1.0}}


def test_a_group_that_cannot_start_on_its_nodes_waits_and_says_why(new_world: NewWorld) -> None:
    """Only two of four workers would fit on one node."""
    world = new_world(workers=4, min_workers=4, nodes=1, memory=True, **BIG)
    world.node_memory_bytes = 3 << 30
    world.open()
    world.start_all()
    assert world.state.stage is Stage.WAITING
    [waiting] = world.events("job.waiting")
    assert "10.0.0.1 has 3.0 GiB of memory, and 4 workers need " in waiting["reason"]
    wait = find_wait(world.state)
    assert wait is not None and waiting["reason"] in wait.message
    world.pass_time(world.state.target.spec.elasticity.wait_s + 1)
    assert world.end is not None and world.end.reason is EndReason.CAPACITY_TIMEOUT
    assert waiting["reason"] in world.end.message


def test_the_same_group_forms_where_the_memory_is_not_known(new_world: NewWorld) -> None:
    world = new_world(workers=4, min_workers=4, nodes=1, memory=True, **BIG).open()
    world.start_all()
    assert world.state.stage is Stage.FORMING


def test_a_group_that_trains_does_not_grow_into_one_that_cannot_start(new_world: NewWorld) -> None:
    """Each worker builds the whole model, 1 GiB: of six workers that is more than their state of 4 GiB."""
    own = {"task": "mine:Task", "data": {}, "plan": {"num_params": 1 << 28}}
    world = new_world(workers=4, min_workers=1, nodes=1, **own)
    world.node_memory_bytes = 4400 << 20
    world.open(then=1)
    world.direct(granted=6)
    world.start_all()
    world.pass_time(60.0)
    world.run(1)
    assert world.state.stage is Stage.RUNNING and len(world.group()) == 4
    running = world.state.current
    assert isinstance(running, Running)
    decision = switching.decide(world.state, replace(running, kept_layout_for=None), world.now, plan)
    assert not decision and "10.0.0.1 has 4.3 GiB of memory, and 6 workers need 6.3 GiB" in decision.reason
