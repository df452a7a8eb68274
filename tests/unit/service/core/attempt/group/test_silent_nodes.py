"""A node that answers no connect: its workers are left out, nothing is ended, and they take part again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.messages import (
    Interrupt,
    KillWorker,
    NodesSilent,
    StartWorker,
    SuspectNode,
    WorkerUnreachable,
)
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ExitKind

NewWorld = Callable[..., Any]
WHY = "no answer to 6 connects in 1.6 s"


def running(new_world: NewWorld, **settings: Any) -> Any:
    """Three workers on as many nodes, after two steps; their last polls were answered a while ago."""
    world = new_world(workers=3, memory=True, **settings).open(then=2)
    world.pass_time(2.0)
    return world


def cut(world: Any, index: int) -> None:
    world.stop(index)
    world.feed(NodesSilent({f"n{index}": WHY}))


def heal(world: Any, index: int) -> None:
    worker = world.workers[index]
    worker.is_stopped = worker.is_stuck = False
    world.feed(NodesSilent({}))


def test_the_group_re_forms_without_the_workers_of_a_silent_node_and_ends_nothing(new_world: NewWorld) -> None:
    world = running(new_world)
    cut(world, 2)
    assert world.state.stage is Stage.QUIESCING
    assert {c.index for c in world.commands if isinstance(c, Interrupt)} == {0, 1, 2}, "it is fenced, too"
    world.recover()
    world.run(1)
    assert world.state.stage is Stage.RUNNING and world.state.group.workers == (0, 1)
    assert world.count(KillWorker) == 0 and world.count(StartWorker) == 3 and world.count(SuspectNode) == 0
    assert world.state.budgets.recoveries == 0, "a suspicion is not charged"
    [incident] = world.incidents()
    assert (incident.cause, incident.ranks, incident.node_id) == (IncidentCause.NODE_UNREACHABLE, (2,), "n2")
    assert incident.closed and incident.steps_lost == 0 and incident.action == "leave out until it answers, shrink"
    [event] = world.events("node.silent")
    assert (event["node_id"], event["ranks"], event["message"]) == ("n2", [2], WHY)


def test_its_workers_are_spares_once_the_node_answers_and_they_have_left(new_world: NewWorld) -> None:
    world = running(new_world)
    cut(world, 2)
    world.recover()
    world.run(1)
    heal(world, 2)
    assert len(world.state.pool.usable) == 2, "it is still in the generation that went on without it"
    world.leave(world.workers[2], ExitKind.INTERRUPTED)
    world.deliver_all()
    assert len(world.state.pool.usable) == 3
    world.until(Stage.RUNNING)
    world.run(1)
    world.until(Stage.RUNNING)
    assert world.state.group.workers == (0, 1, 2) and world.state.history.steps_lost == 0
    assert world.count(KillWorker) == 0 and world.count(StartWorker) == 3
    assert len(world.incidents()) == 1 and len(world.events("node.answers")) == 1


def test_a_node_that_ray_declares_dead_turns_the_suspicion_into_its_death(new_world: NewWorld) -> None:
    world = running(new_world)
    cut(world, 2)
    world.recover()
    world.run(1)
    assert world.incidents()[0].closed
    world.die_node("n2")
    world.deliver_all()
    [incident] = world.incidents()
    assert (incident.cause, incident.closed, incident.message) == (IncidentCause.NODE_DIED, True, "killed by signal 9")
    assert world.count(SuspectNode) == 1 and world.state.budgets.recoveries == 1
    world.pass_time(1.0)
    assert world.count(StartWorker) == 4, "it is replaced"


def test_the_cause_changes_while_the_incident_is_open(new_world: NewWorld) -> None:
    world = running(new_world)
    cut(world, 2)
    world.die_node("n2")
    world.deliver_all()
    assert world.state.incident.cause is IncidentCause.NODE_DIED
    world.recover()
    world.run(1)
    assert [incident.cause for incident in world.incidents()] == [IncidentCause.NODE_DIED]
    assert world.state.budgets.recoveries == 1 and world.state.health.silences == {}


def test_a_node_whose_worker_answers_polls_is_not_silent(new_world: NewWorld) -> None:
    world = running(new_world)
    world.beat(2, beat=10)
    world.feed(NodesSilent({"n2": WHY}))
    assert world.state.stage is Stage.RUNNING and world.state.pool.worker(2).left_out is None
    world.pass_time(1.5)
    world.feed(NodesSilent({"n2": WHY}))
    assert world.state.stage is Stage.QUIESCING


def test_calls_that_fail_do_not_give_up_a_worker_that_is_left_out(new_world: NewWorld) -> None:
    world = running(new_world)
    cut(world, 2)
    world.recover()
    world.feed(WorkerUnreachable(2))
    world.pass_time(30.0)
    assert world.count(KillWorker) == 0
    world.pass_time(31.0)
    [killed] = [c for c in world.commands if isinstance(c, KillWorker)]
    assert killed.index == 2 and killed.reason == "its node was silent for 60 s"


def test_a_worker_that_answers_but_does_not_leave_its_old_generation_is_replaced(new_world: NewWorld) -> None:
    world = running(new_world)
    cut(world, 2)
    world.recover()
    world.run(1)
    heal(world, 2)
    world.pass_time(61.0)
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [2]


def test_a_silent_spare_disturbs_no_group_and_is_not_taken(new_world: NewWorld) -> None:
    world = running(new_world, standby=1)
    world.feed(NodesSilent({"n3": WHY}))
    assert world.state.stage is Stage.RUNNING and world.incidents() == []
    world.lose(1)
    assert world.state.group.workers == (0, 2)
    world.feed(NodesSilent({}))
    assert world.state.pool.worker(3) in world.state.pool.usable


def test_if_too_few_are_left_others_are_started(new_world: NewWorld) -> None:
    world = running(new_world, min_workers=3)
    cut(world, 2)
    world.quiesce()
    assert world.state.stage is Stage.WAITING
    world.pass_time(0.25)
    [start] = [c for c in world.commands if isinstance(c, StartWorker)][3:]
    assert start.avoid_nodes == ("n2",)


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.FORMING])
def test_a_silent_node_delays_no_group_that_is_about_to_form(new_world: NewWorld, stage: Stage) -> None:
    world = new_world(workers=3, memory=True).open()
    if stage is Stage.FORMING:
        world.start_all()
        world.pass_time(2.0)
        cut(world, 1)
        world.recover()
    else:
        for index in (0, 1):
            world.start(index)
        world.deliver_all()
        cut(world, 1)
        world.start(2)
        world.deliver_all()
        world.pass_time(3.25)
        world.join()
    assert world.state.stage is Stage.RUNNING and world.state.group.workers == (0, 2)
