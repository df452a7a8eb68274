"""Drained nodes and preempted workers are left at a step boundary, and no step is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_service.core.attempt.messages import (
    KillWorker,
    NodesAvoided,
    ReportArrived,
    RequestYield,
    StartWorker,
    SuspectNode,
)
from shoal_service.core.attempt.state.parts import AvoidedNode, Stage
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.worker_reports import PreemptionNotice

NewWorld = Callable[..., Any]


def drain(world: Any, *node_ids: str, in_s: float | None = None) -> None:
    deadline = None if in_s is None else world.now + in_s
    world.feed(NodesAvoided(tuple(AvoidedNode(node_id=n, reason="requested", deadline=deadline) for n in node_ids)))


def notify(world: Any, index: int, grace_s: float) -> None:
    generation = world.state.group.generation
    world.feed(
        ReportArrived(index, PreemptionNotice(generation=generation, at=world.now, grace_s=grace_s, reason="SIGTERM"))
    )


def switch(world: Any) -> None:
    world.advance()
    world.finish_storage()
    world.join()
    world.run(1)


def test_a_drained_node_is_left_once_a_replacement_is_warm(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    drain(world, "n1")
    assert world.state.stage is Stage.RUNNING
    [started] = [c for c in world.commands if isinstance(c, StartWorker)][3:]
    assert started.avoid_nodes == ("n1",)
    world.start_all()
    assert world.state.stage is Stage.SWITCHING
    assert world.events("generation.switching")[0] == {
        "generation": 1,
        "reason": "drain n1: requested",
        "durable": False,
    }
    switch(world)
    assert world.state.group.workers == (0, 3, 2) and world.state.progress.step == 7
    assert world.state.history.steps_lost == 0 and world.incidents() == []
    assert [c.reason for c in world.commands if isinstance(c, KillWorker) and c.index == 1] == ["requested"]


def test_with_a_warm_standby_the_group_leaves_without_a_wait(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=5)
    drain(world, "n1")
    assert world.state.stage is Stage.SWITCHING


def test_without_a_replacement_the_group_shrinks(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    drain(world, "n1")
    world.pass_time(2.75)
    assert world.state.stage is Stage.RUNNING, "a replacement is starting"
    world.pass_time(0.5)
    assert world.state.stage is Stage.SWITCHING
    switch(world)
    assert world.state.group.workers == (0, 2) and world.state.history.steps_lost == 0


def test_if_no_other_node_has_room_the_group_shrinks_at_once(new_world: NewWorld) -> None:
    """It trained there for 15 s more, waiting for a worker that could not be placed."""
    world = new_world(workers=3, memory=True).open(then=2)
    world.feed(NodesAvoided((AvoidedNode(node_id="n2", reason="drained: new disks", is_replaceable=False),)))
    assert world.state.stage is Stage.SWITCHING
    [switching] = world.events("generation.switching")
    assert switching["reason"].endswith("; no other node has room for a worker that takes its place")
    world.until(Stage.RUNNING)
    assert world.state.group.workers == (0, 1) and world.state.history.steps_lost == 0


def test_a_deadline_is_not_waited_for_to_the_last_second(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    drain(world, "n1", in_s=7.0)
    world.pass_time(0.75)
    assert world.state.stage is Stage.RUNNING
    world.pass_time(0.25)
    assert world.state.stage is Stage.SWITCHING, "five seconds and two steps before"


def test_below_min_workers_a_drained_node_is_kept(new_world: NewWorld) -> None:
    world = new_world(workers=3, min_workers=3, memory=True).open(then=5)
    drain(world, "n1")
    world.pass_time(30.0)
    assert world.state.stage is Stage.RUNNING and world.world_size == 3


def test_unless_its_time_has_come_and_then_a_checkpoint_is_left(new_world: NewWorld) -> None:
    world = new_world(workers=3, min_workers=3, memory=True).open(then=5)
    drain(world, "n1", in_s=20.0)
    world.pass_time(15.0)
    assert world.state.stage is Stage.SWITCHING
    assert {c.durable for c in world.commands if isinstance(c, RequestYield)} == {True}
    world.run(1)
    assert world.state.stage is Stage.WAITING and world.state.checkpoints.newest == "step-000000000006-a1-g1"
    assert world.state.pool.worker(1) is None, "nothing stays there"
    world.start_all()
    world.join()
    assert world.world_size == 3 and world.state.history.steps_lost == 0


def test_an_undone_drain_changes_nothing(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    drain(world, "n1")
    drain(world)
    world.pass_time(10.0)
    assert world.state.stage is Stage.RUNNING and world.state.current.draining_since is None


def test_a_worker_request_that_avoids_a_node_is_renewed_once_the_node_may_be_used(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    drain(world, "n1")
    world.pass_time(5.0)
    switch(world)
    assert world.world_size == 2 and not world.state.pool.worker(3).warm, "nowhere else is room for it"
    drain(world)
    [anew] = [c for c in world.commands if isinstance(c, StartWorker)][4:]
    assert world.state.pool.worker(3) is None and anew.avoid_nodes == ()
    world.start_all()
    switch(world)
    assert world.world_size == 3 and world.state.history.steps_lost == 0


def test_a_spare_on_a_drained_node_is_moved(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=1, memory=True).open(then=5)
    drain(world, "n2")
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [2]
    assert world.count(StartWorker) == 4 and world.state.stage is Stage.RUNNING


def test_a_worker_lost_on_a_node_that_is_being_left_counts_as_preempted(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    drain(world, "n1", in_s=60.0)
    world.die_node("n1")
    world.recover()
    world.run(1)
    [incident] = world.incidents()
    assert incident.cause is IncidentCause.PREEMPTED and incident.steps_lost == 0
    assert world.count(SuspectNode) == 0, "nothing is wrong with it"


def test_a_worker_that_gives_notice_is_left_like_a_node(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=5)
    notify(world, 1, grace_s=30.0)
    assert world.events("worker.leaving")[0]["grace_s"] == 30.0
    assert world.state.stage is Stage.SWITCHING
    switch(world)
    assert world.state.group.workers == (0, 3, 2) and world.state.pool.worker(1) is None
    assert [c.avoid_nodes for c in world.commands if isinstance(c, StartWorker)][-1] == (), "the node is all right"


def test_a_short_notice_leaves_no_time_to_wait_for_a_replacement(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    notify(world, 1, grace_s=5.0)
    assert world.state.stage is Stage.SWITCHING
    switch(world)
    assert world.state.group.workers == (0, 2) and world.state.history.steps_lost == 0


def test_a_worker_that_dies_of_what_it_announced_was_preempted(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    notify(world, 1, grace_s=30.0)
    world.lose(1)
    assert world.state.incident.cause is IncidentCause.PREEMPTED


def test_a_notice_counts_once(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=5)
    notify(world, 1, grace_s=30.0)
    notify(world, 1, grace_s=300.0)
    assert len(world.events("worker.leaving")) == 1
