"""A node is suspected if its workers are at fault, no healthy worker runs on it, and another node exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal_service.core.attempt.messages import DeathExplained, NodesAvoided, SuspectNode
from shoal_service.core.attempt.placement import candidates
from shoal_service.core.attempt.state.parts import AvoidedNode, Stage
from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_workers.contract.exception_causes import ErrorClass
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase

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


def break_gpu(world: Any, rank: int) -> None:
    """The rank raises an error of its GPU, and the next group forms."""
    error = ErrorReport(
        type="AcceleratorError", message="Xid", traceback="", phase=Phase.FORWARD, error_class=ErrorClass.DEVICE
    )
    world.leave(world.group()[rank], ExitKind.WORKER_FAULT, error)
    world.deliver_all()
    world.pass_time(world.state.config.timeouts.user_error_grace_s)
    world.recover()


def test_the_group_leaves_a_node_whose_gpu_failed_at_once_and_not_once_more(new_world: NewWorld) -> None:
    world = new_world(workers=4, standby=2, memory=True, nodes=3).open(then=6)  # two workers on each node
    break_gpu(world, 1)
    assert set(world.state.group.nodes) == {"n0", "n2"}
    world.run(1)
    world.feed(NodesAvoided((AvoidedNode(node_id="n1", reason="on probation", is_suspected=True),)))
    world.run(1)
    assert world.state.group.generation == 2 and world.state.stage is Stage.RUNNING


def test_the_group_stays_on_a_node_whose_gpu_failed_if_there_is_no_other(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True, nodes=1).open(then=6)
    break_gpu(world, 1)
    assert len(world.state.group.workers) == 2


def test_the_group_stays_on_a_suspected_node_if_all_others_are_on_one_that_is_drained(new_world: NewWorld) -> None:
    world = new_world(workers=8, memory=True, nodes=2).open(then=6)
    drained = AvoidedNode(node_id="n0", reason="drained", deadline=1e9)
    world.state = replace(world.state, target=replace(world.state.target, avoided=(drained,)))
    break_gpu(world, 1)
    assert len(world.state.group.workers) == 3 and set(world.state.group.nodes) == {"n1"}


def test_the_group_does_not_shrink_to_the_single_worker_of_another_node(new_world: NewWorld) -> None:
    world = new_world(workers=8, memory=True, nodes=1).open(then=6)
    world.num_nodes = None  # the next worker starts on another node
    break_gpu(world, 1)
    world.run(1)
    world.start_all()
    world.pass_time(4.0)
    world.until(Stage.RUNNING)
    assert len(world.state.group.workers) == 8 and set(world.state.group.nodes) == {"n0", "n8"}
    closed = world.state.health.last_closed
    assert closed is not None
    health = replace(world.state.health, suspected={"n0": closed.incident.at})
    state = replace(world.state, incident=closed.incident, health=health)
    assert len(candidates(state, world.now)) == 8
    health = replace(health, suspected={"n8": closed.incident.at})
    assert len(candidates(replace(state, health=health), world.now)) == 7
