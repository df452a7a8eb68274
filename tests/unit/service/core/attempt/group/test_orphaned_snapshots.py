"""Workers die together, and no live worker serves their snapshots: new workers start on their nodes to serve them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.messages import KillWorker, NodesAvoided, StartWorker, WorkerLost
from shoal_service.core.attempt.state.parts import AvoidedNode, Stage
from shoal_service.supervisor.reporting.status import job_state
from shoal_workers.contract.job import IncidentCause, JobState

NewWorld = Callable[..., Any]


def bereft(new_world: NewWorld, *, cause: IncidentCause = IncidentCause.WORKER_DIED, **settings: Any) -> Any:
    """Ranks 1 and 2 of three, each on a node of its own, are lost in step 7; the newest checkpoint is of step 4."""
    world = new_world(workers=3, memory=True, **settings).open(then=6)
    world.die(1, cause)
    world.lose(2, cause)
    return world


def sent(world: Any) -> dict[str, int]:
    """By node, the worker that was started on it and nowhere else."""
    return {c.only_on: c.index for c in world.commands if isinstance(c, StartWorker) and c.only_on}


def suspect(world: Any, *node_ids: str, **more: Any) -> None:
    """The control plane has the job avoid these nodes, because it has suspected them."""
    avoided = {"reason": "suspected by this job: 3 workers lost", "is_suspected": True} | more
    world.feed(NodesAvoided(tuple(AvoidedNode(node_id=node_id, **avoided) for node_id in node_ids)))


def test_snapshots_on_their_nodes_are_fetched_and_no_step_is_lost(new_world: NewWorld) -> None:
    world = bereft(new_world)
    assert world.state.stage is Stage.WAITING and job_state(world.state) is JobState.RECOVERING
    assert sent(world) == {"n1": 3, "n2": 4}
    world.start_all()
    world.until(Stage.RUNNING)
    world.run(1)
    [incident] = world.incidents()
    assert (incident.state_source, incident.steps_lost, incident.to_workers) == ("memory", 0, 3)
    assert world.state.snapshots.unreported_nodes == ()


def test_one_node_may_be_enough(new_world: NewWorld) -> None:
    world = bereft(new_world)
    world.start(sent(world)["n1"])
    world.deliver_all()
    assert world.state.stage is Stage.WAITING, "timeouts.settle_s has not passed"
    world.pass_time(3.25)
    assert world.state.stage is Stage.FORMING and world.state.group.source.step == 6
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [sent(world)["n2"]]


def test_the_wait_for_a_node_that_does_not_answer_is_bounded(new_world: NewWorld) -> None:
    world = bereft(new_world)
    for node in ("n1", "n2"):
        world.deaths[node] = 1
        world.memory.pop(node)
    world.pass_time(14.75)
    assert world.state.stage is Stage.WAITING
    world.pass_time(0.5)
    assert world.state.stage is Stage.FORMING
    assert world.state.group.source is None and world.state.group.restored is not None
    assert {c.index for c in world.commands if isinstance(c, KillWorker)} == set(sent(world).values())


def test_dead_nodes_are_not_waited_for(new_world: NewWorld) -> None:
    world = bereft(new_world, cause=IncidentCause.NODE_DIED)
    assert world.state.group.generation == 2 and sent(world) == {}


def test_there_is_no_wait_if_a_live_worker_serves_the_snapshot(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True, nodes=2).open(then=6)
    world.lose(1)
    assert world.state.group.generation == 2 and sent(world) == {}


def test_one_step_is_done_again_rather_than_waited_for(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    world.die(1)
    world.lose(2)
    assert world.state.group.generation == 2 and sent(world) == {}


def test_no_worker_is_started_for_snapshots_that_no_node_has(new_world: NewWorld) -> None:
    """Snapshots are taken at a slower pace: the newest one is complete and two steps old."""
    world = new_world(workers=3, memory=True, checkpoint={"every_steps": None}).open(then=4)
    kept = {node: list(held) for node, held in world.memory.items()}
    world.train(2)
    world.deliver_all()
    world.memory = kept
    world.lose(1)
    assert world.state.group.generation == 2 and sent(world) == {}


def test_it_ends_with_the_time_that_was_given(new_world: NewWorld) -> None:
    world = bereft(new_world, min_workers=3)
    world.direct(granted=3)
    world.pass_time(15.25)
    assert world.state.stage is Stage.WAITING and world.state.current.orphans_until is None
    fresh = [p for p in world.state.pool.workers if not p.warm]
    assert len(fresh) == 2 and not any(p.only_on for p in fresh), "they may come up anywhere now"


def test_a_node_that_is_gone_when_a_worker_is_sent_there_is_given_up_and_no_start_has_failed(
    new_world: NewWorld,
) -> None:
    """Its raylet was killed together with the last worker: Ray refuses each start there at once."""
    world = bereft(new_world)
    for _ in range(4):
        for index in [p.index for p in world.state.pool.workers if p.only_on and not p.warm]:
            world.feed(WorkerLost(index, IncidentCause.NODE_DIED, "start", "the node is gone"))
    assert world.state.snapshots.unreported_nodes == () and world.state.budgets.failed_starts == 0
    world.pass_time(3.25)  # timeouts.settle_s
    assert world.state.stage is Stage.FORMING and world.state.group.restored is not None


def lose_suspected(world: Any, *, is_known_first: bool = True) -> int:
    """The worker of n1 dies, the job suspects the node, and n2, which has the copy of rank 1, dies with its memory.
    Return the index of the worker that starts on n1."""
    world.die(1)
    world.deliver_all()
    if is_known_first:
        suspect(world, "n1")
    world.die_node("n2")
    world.recover()
    suspect(world, "n1")
    assert set(sent(world)) == {"n1"}
    return sent(world)["n1"]


@pytest.mark.parametrize("is_known_first", [True, False])
def test_a_worker_on_a_suspected_node_serves_its_snapshots_and_never_trains(
    new_world: NewWorld, is_known_first: bool
) -> None:
    """The control plane says that the node is avoided before or after a worker is started there."""
    world = new_world(workers=3, memory=True).open(then=6)
    server = lose_suspected(world, is_known_first=is_known_first)
    assert world.count(StartWorker) == 3 + 3, "two others take the lost places"
    world.start_all()
    world.until(Stage.RUNNING)
    assert world.state.group.source.step == 6 and world.state.group.source.parts[1].node_id == "n1"
    assert world.world_size == 3 and "n1" not in world.state.group.nodes
    assert world.state.pool.worker(server) is not None, "it serves until the group has a snapshot of its own"
    world.run(1)
    [incident] = world.incidents()
    assert (incident.state_source, incident.steps_lost, incident.to_workers) == ("memory", 0, 3)
    assert world.state.pool.worker(server) is None and len(world.state.pool.workers) == 3


def test_a_worker_on_a_suspected_node_is_not_taken_below_min_workers_either(new_world: NewWorld) -> None:
    world = new_world(workers=3, min_workers=2, memory=True).open(then=6)
    world.start(lose_suspected(world))
    world.deliver_all()
    world.pass_time(10.0)
    assert world.state.stage is Stage.WAITING and world.state.num_usable == 1
    suspect(world)
    world.pass_time(3.25)  # timeouts.settle_s
    assert world.state.stage is Stage.FORMING and world.state.group.nodes == ("n0", "n1"), "a test has cleared the node"


def test_a_suspected_node_without_room_is_given_up_in_time(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    server = lose_suspected(world)
    for worker in world.state.pool.workers:
        if worker.index != server:
            world.start(worker.index)
    world.deliver_all()
    world.pass_time(14.75)
    assert world.state.stage is Stage.WAITING
    world.pass_time(0.5)
    assert world.state.stage is Stage.FORMING and world.state.group.source is None
    assert world.state.pool.worker(server) is None and world.world_size == 3


@pytest.mark.parametrize("order", [{}, {"keeps_workers": True}])
def test_no_worker_is_started_on_a_drained_or_cordoned_node(new_world: NewWorld, order: dict[str, bool]) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    world.die(1)
    world.deliver_all()
    suspect(world, "n1", is_suspected=False, **order)
    world.lose(2)
    assert set(sent(world)) == {"n2"}


def test_a_worker_that_dies_on_a_suspected_node_was_not_taken_away_and_leaves_its_memory(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    suspect(world, "n1")
    world.die(1)
    world.die_node("n2")
    world.recover()
    assert set(sent(world)) == {"n1"}
    assert [lost["cause"] for lost in world.events("worker.lost")] == ["worker_died", "node_died"]
