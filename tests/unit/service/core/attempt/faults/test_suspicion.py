"""A node is suspected if its workers are at fault, no healthy worker runs on it, and another node exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_service.core.attempt.messages import DeathExplained, SuspectNode
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_workers.contract.job import IncidentCause

NewWorld = Callable[..., Any]


def suspected(world: Any) -> list[str]:
    return [c.node_id for c in world.commands if isinstance(c, SuspectNode)]


def lose(world: Any, index: int) -> None:
    world.lose(index)
    world.run(1)
    world.start_all()
    world.until(Stage.RUNNING)


def test_a_dead_node_is_suspected_once(new_world: NewWorld) -> None:
    world = new_world(workers=4, memory=True, nodes=2).open(then=6)
    world.die_node("n1")
    world.recover()
    assert suspected(world) == ["n1"]


def test_a_stuck_worker_does_not_incriminate_a_node_with_healthy_ones(new_world: NewWorld) -> None:
    world = new_world(workers=4, memory=True, nodes=2).open(then=6)
    world.stop(1)
    world.break_collectives()
    world.recover()
    world.pass_time(Timeouts().unresponsive_s)
    assert world.events("worker.lost")[0]["cause"] == IncidentCause.STUCK and suspected(world) == []


def test_a_stuck_worker_that_is_alone_does(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=6)
    world.stop(1)
    world.break_collectives()
    world.recover()
    world.pass_time(Timeouts().unresponsive_s)
    assert suspected(world) == ["n1"]


def test_the_only_node_is_not_suspected(new_world: NewWorld) -> None:
    world = new_world(workers=1, memory=True, nodes=1).open(then=6)
    world.stop(0, unreachable=True)
    world.deliver_all()
    world.pass_time(3.0)
    assert world.count(SuspectNode) == 0 and world.events("worker.lost")


def test_a_node_that_loses_one_worker_after_the_other_is_suspected(new_world: NewWorld) -> None:
    world = new_world(workers=4, memory=True, nodes=2).open(then=1)
    world.total_steps = 100
    for lost in range(3):
        assert suspected(world) == [], f"after {lost}"
        lose(world, next(p.index for p in world.group() if p.node_id == "n1"))
    assert suspected(world) == ["n1"]


def test_losses_on_several_nodes_suspect_no_node(new_world: NewWorld) -> None:
    world = new_world(workers=4, memory=True, nodes=2).open(then=1)
    world.total_steps = 100
    for lost in range(8):
        node_id = f"n{lost % 2}"
        lose(world, next(p.index for p in world.group() if p.node_id == node_id))
    assert suspected(world) == []


def test_losses_for_lack_of_memory_do_not_count_against_the_fullest_node(new_world: NewWorld) -> None:
    world = new_world(workers=4, memory=True, nodes=2).open(then=1)
    world.total_steps = 100
    for _ in range(3):
        victim = next(p for p in world.group() if p.node_id == "n1")
        lose(world, victim.index)
        world.feed(DeathExplained(f"shoal/j1/1/worker-{victim.index}", "was killed by the kernel: out of memory"))
    assert suspected(world) == []
