"""A rank that computes much longer than the others is replaced at a step boundary, if a replacement exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_service.core.attempt.messages import KillWorker, StartWorker, SuspectNode
from shoal_service.core.attempt.state.parts import Stage

NewWorld = Callable[..., Any]
HEALTH = {"straggler_factor": 2.0, "straggler_steps": 3}


def running(new_world: NewWorld, **settings: Any) -> Any:
    world = new_world(workers=3, memory=True, **{"health": HEALTH, **settings}).open(then=1)
    world.total_steps = 1000
    return world


def slow_steps(world: Any, steps: int) -> None:
    for _ in range(steps):
        world.report(0.1, 0.3, 0.1)


def switch(world: Any) -> None:
    world.train(1, save_every=1000)
    world.deliver_all()
    world.join()
    world.train(1, save_every=1000)
    world.deliver_all()


def test_it_is_replaced_by_a_warm_spare_without_losing_a_step(new_world: NewWorld) -> None:
    world = running(new_world, standby=1)
    slow_steps(world, 2)
    assert world.events("worker.straggler") == []
    slow_steps(world, 1)
    [event] = world.events("worker.straggler")
    assert (event["rank"], event["compute_s"], event["median_s"]) == (1, 0.3, 0.1)
    assert event["action"] == "replaced by a spare"
    assert world.state.stage is Stage.SWITCHING
    assert world.events("generation.switching")[0]["reason"].startswith("replace straggler")
    switch(world)
    assert world.state.group.workers == (0, 3, 2) and world.state.history.steps_lost == 0 and world.incidents() == []
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [1]


def test_without_a_spare_an_extra_worker_is_started_elsewhere(new_world: NewWorld) -> None:
    world = running(new_world)
    slow_steps(world, 3)
    assert world.state.stage is Stage.RUNNING
    assert [c.avoid_nodes for c in world.commands if isinstance(c, StartWorker)][3:] == [("n1",)]
    world.start_all()
    assert world.state.stage is Stage.SWITCHING
    switch(world)
    assert world.state.group.workers == (0, 3, 2) and len(world.state.pool.workers) == 3


def test_without_a_replacement_the_straggler_is_kept_and_ignored_for_a_while(new_world: NewWorld) -> None:
    world = running(new_world)
    slow_steps(world, 3)
    for beat in range(3):
        world.pass_time(20.0)
        world.beat(0, beat=100 + beat)
    assert len(world.events("worker.straggler_kept")) == 1
    assert world.state.stage is Stage.RUNNING and world.world_size == 3
    assert len(world.state.pool.workers) == 3, "the one that never came is dropped"
    slow_steps(world, 29)
    assert len(world.events("worker.straggler")) == 1
    slow_steps(world, 5)
    assert len(world.events("worker.straggler")) == 2


def test_its_node_is_suspected_if_no_other_worker_is_on_it(new_world: NewWorld) -> None:
    world = running(new_world)
    slow_steps(world, 3)
    assert [c.node_id for c in world.commands if isinstance(c, SuspectNode)] == ["n1"]
    world = running(new_world, nodes=1)
    slow_steps(world, 3)
    assert world.count(SuspectNode) == 0


def test_one_fast_step_between_forgives_it(new_world: NewWorld) -> None:
    world = running(new_world)
    for _ in range(5):
        slow_steps(world, 2)
        world.report(0.1, 0.1, 0.1)
    assert world.events("worker.straggler") == []


def test_it_may_be_switched_off(new_world: NewWorld) -> None:
    world = running(new_world, health={"straggler_factor": None, "straggler_steps": 1})
    slow_steps(world, 5)
    assert world.events("worker.straggler") == []


def test_a_step_without_measurements_is_ignored(new_world: NewWorld) -> None:
    world = running(new_world)
    for _ in range(5):
        world.report()
    assert world.events("worker.straggler") == [] and world.state.progress.slow_steps == {}
