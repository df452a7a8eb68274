"""After the supervisor's own death: the requests without an answer, as far as the state tells them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_service.core.attempt.commands import FindCheckpoint, Interrupt, RequestYield
from shoal_service.core.attempt.events import GrantChanged
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.unanswered import orders_of
from shoal_workers.contract.job import EndReason

NewWorld = Callable[..., Any]


def test_the_search_for_a_checkpoint_is_repeated(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    assert orders_of(world.state) == (FindCheckpoint(),)
    world.committed["step-000000000004-a0-g1"] = False
    world.open()
    world.start_all()
    world.form()
    world.deliver_all()
    assert orders_of(world.state) == (FindCheckpoint(excluding=("step-000000000004-a0-g1",)),)


def test_those_still_in_run_are_interrupted_again(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    world.die(1)
    world.deliver_all()
    assert orders_of(world.state) == (Interrupt(0, 1), Interrupt(2, 1))


def test_workers_still_in_run_receive_the_yield_again(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    world.feed(GrantChanged(2))
    world.train(1)
    world.deliver("exit-0")
    assert orders_of(world.state) == (RequestYield(1, 1), RequestYield(2, 1))


def test_a_running_group_is_left_alone(new_world: NewWorld) -> None:
    assert orders_of(new_world(workers=2).open(then=5).state) == ()


def test_the_commit_of_the_result_is_repeated(new_world: NewWorld) -> None:
    """Else the job would wait for an answer that died with the supervisor, and call its finished training a failure."""
    world = new_world(workers=2).open(then=11)
    world.train(1)
    world.deliver_all()
    assert world.state.stage is Stage.COMMITTING
    commits, world.commits = world.commits, []
    assert list(orders_of(world.state)) == commits
    world.perform(orders_of(world.state))
    world.answer_storage()
    world.deliver_all()
    assert world.end.reason is EndReason.FINISHED


def test_a_commit_of_the_generation_before_is_repeated(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=7)
    world.train(1)
    world.deliver_all()
    commits = world.commits
    world.die(1)
    world.recover()
    assert world.state.group.generation == 2 and list(orders_of(world.state)) == commits
    world.answer_storage()
    world.deliver_all()
    assert orders_of(world.state) == () and world.state.checkpoints.parts == {}
