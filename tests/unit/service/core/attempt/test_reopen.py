"""After the death of the supervisor: the orders without an answer, which its successor repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kit.worlds.attempt.lives import entry_of, restart_from
from shoal_service.core.attempt.messages import FindCheckpoint, Interrupt, RequestYield
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import EndReason

NewWorld = Callable[..., Any]
OLD = "step-000000000004-a0-g1"


def test_the_search_for_a_checkpoint_is_repeated(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    world.committed[OLD] = False
    world.open()
    world.start_all()
    world.join()
    assert world.issued == [FindCheckpoint(excluding=(OLD,), expected=OLD)]


def test_those_still_in_run_are_interrupted_again(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    world.die(1)
    world.deliver_all()
    assert world.issued == [Interrupt(0, 1), Interrupt(2, 1)]


def test_workers_still_in_run_receive_the_yield_again(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=5)
    world.direct(granted=2)
    world.train(1)
    world.deliver("exit-0")
    assert world.issued == [RequestYield(1, 1), RequestYield(2, 1)]


def test_a_running_group_is_left_alone(new_world: NewWorld) -> None:
    assert new_world(workers=2).open(then=5).issued == []


def test_the_commit_of_the_result_is_repeated(new_world: NewWorld) -> None:
    """Else the job would wait for an answer that died with the supervisor, and call its finished training a failure."""
    world = new_world(workers=2).open(then=11)
    world.advance()
    assert world.state.stage is Stage.COMMITTING
    commits, world.commits = world.commits, []
    assert world.issued == commits
    world.perform(world.issued)
    world.finish_storage()
    assert world.end.reason is EndReason.FINISHED


def test_a_commit_of_the_generation_before_is_repeated(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=7)
    world.advance()
    commits = world.commits
    world.lose(1)
    assert world.state.group.generation == 2 and world.issued == commits
    world.finish_storage()
    assert world.issued == [] and world.state.checkpoints.parts == {}


def test_what_a_predecessor_trained_after_its_last_journal_entry_is_not_done_again(new_world: NewWorld) -> None:
    """The head was away. The journal waits for the back-off of a group that could not form, and all workers are warm;
    the predecessor has formed that group, and it has trained."""
    world = new_world(workers=2, memory=True, nodes=2).open(then=0)
    for _ in range(3):
        world.break_collectives()
        world.deliver_all()
        world.join()
    entry = entry_of(world)
    assert entry.state.stage is Stage.WAITING and entry.state.budgets.form_not_before > world.now
    world.pass_time(2.0)
    world.join()
    world.train(3)
    world.deliver_all()
    restart_from(world, entry)
    assert world.state.progress.step == 0
    world.until(Stage.RUNNING)
    assert world.state.group.start_step == 3


def test_a_worker_that_had_left_when_the_journal_was_written_is_asked_what_it_holds_now(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True, nodes=2).open(then=1)
    world.break_collectives()
    world.deliver("exit-1")
    entry = entry_of(world)
    assert entry.state.stage is Stage.QUIESCING and list(entry.state.group.exits) == [1]
    world.deliver_all()
    world.join()
    world.train(2)
    world.deliver_all()
    world.die(0)
    restart_from(world, entry)
    world.until(Stage.RUNNING)
    assert world.state.group.start_step == 3
