"""Hot update of the code, until the new code takes over: which workers start, when it is ready, and what refuses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kit.worlds.attempt.world import World
from shoal_service.core.attempt.messages import CompareModels, ModelsCompared, StartWorker
from shoal_service.core.attempt.state.parts import Stage

NewWorld = Callable[..., World]
OLD, NEW, OTHER = "", "a" * 64, "b" * 64


def warm_up(world: World) -> None:
    """The new workers become warm, and one of them has built the same model."""
    world.start_all()
    world.deliver_all()


def cohort(world: World, version: str = NEW) -> list[int]:
    return [worker.index for worker in world.state.pool.workers if worker.code == version]


def test_as_many_workers_start_beside_the_group_each_on_the_node_of_one_of_it(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True, nodes=2).open(then=3)
    commands = world.direct(code=NEW)
    started = [c for c in commands if isinstance(c, StartWorker)]
    assert [(c.code, c.is_beside, c.only_on) for c in started] == [(NEW, True, node) for node in ("n0", "n0", "n1")]
    assert world.state.stage is Stage.RUNNING and [e["version"] for e in world.events("code.updating")] == [NEW]


def test_the_new_code_takes_over_at_a_step_boundary_and_no_step_is_lost(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    world.direct(code=NEW)
    new = cohort(world)
    warm_up(world)
    assert world.state.stage is Stage.SWITCHING
    world.run(1)
    world.join()
    assert [worker.index for worker in world.group()] == new
    assert (world.state.group.start_step, world.state.history.steps_lost) == (4, 0)
    assert world.incidents() == [] and world.state.code.trial is not None


def test_the_new_code_does_not_take_over_before_all_its_workers_are_warm_and_the_model_is_compared(
    new_world: NewWorld,
) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    world.answers_comparisons = False
    world.direct(code=NEW)
    first, second = cohort(world)
    world.start(first)
    world.deliver_all()
    assert [c for c in world.commands if isinstance(c, CompareModels)] == [CompareModels(first, 0)]
    world.feed(ModelsCompared(first, ""))
    assert world.state.stage is Stage.RUNNING
    world.start(second)
    world.deliver_all()
    assert world.state.stage is Stage.SWITCHING


def test_another_model_is_refused_with_the_difference_and_training_goes_on(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    world.difference = "its model does not fit: weight is float32 [3] and was float32 [2]"
    world.direct(code=NEW)
    warm_up(world)
    assert world.state.stage is Stage.RUNNING and cohort(world) == []
    (refused,) = world.events("code.refused")
    assert (refused["version"], refused["reason"]) == (NEW, world.difference)
    world.run(2)
    assert world.state.progress.step == 5 and world.state.group.generation == 1
    assert cohort(world) == [], "it is not tried again by itself"


def test_code_that_cannot_be_loaded_is_refused(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    world.direct(code=NEW)
    world.fail_to_start(cohort(world)[1])
    world.deliver_all()
    assert "no torchvision" in world.events("code.refused")[0]["reason"]
    assert world.state.stage is Stage.RUNNING and cohort(world) == [] and world.end is None


def test_a_worker_that_dies_while_it_loads_the_new_code_refuses_it(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    world.direct(code=NEW)
    world.die(cohort(world)[0])
    world.deliver_all()
    assert "killed by signal 9" in world.events("code.refused")[0]["reason"]
    assert cohort(world) == [] and world.state.budgets.failed_starts == 0


def test_workers_that_do_not_become_warm_in_time_refuse_the_update(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    world.direct(code=NEW)
    world.pass_time(world.state.config.timeouts.start_s + 1)
    assert "start_s" in world.events("code.refused")[0]["reason"]


@pytest.mark.parametrize("version", [OLD, OTHER])
def test_another_version_that_is_wanted_meanwhile_ends_the_update(new_world: NewWorld, version: str) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    world.direct(code=NEW)
    world.direct(code=version)
    assert cohort(world) == [] and world.events("code.refused") == []
    assert len(cohort(world, OTHER)) == (2 if version == OTHER else 0)


def test_a_refused_version_is_tried_again_when_it_is_requested_again(new_world: NewWorld) -> None:
    world = new_world(workers=1, memory=True).open(then=3)
    world.direct(code=NEW)
    world.fail_to_start(cohort(world)[0])
    world.deliver_all()
    world.direct(code=OLD)
    world.direct(code=NEW)
    assert len(cohort(world)) == 1


def test_a_group_that_is_lost_forms_again_with_the_code_before(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True, nodes=1).open(then=3)
    world.direct(code=NEW)
    world.start_all()
    world.state.code.warming and world.die(1)
    world.recover()
    assert {world.state.pool.worker(index).code for index in world.state.group.workers} == {OLD}
    assert world.state.history.steps_lost <= 1


def test_a_smaller_grant_needs_fewer_workers_with_the_new_code(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=3)
    world.direct(code=NEW)
    world.direct(granted=2)
    for index in cohort(world)[:2]:
        world.start(index)
    world.deliver_all()
    world.run(1)
    world.join()
    assert len(world.group()) == 2


def test_a_restarted_supervisor_goes_on_with_the_update(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    world.answers_comparisons = False
    world.direct(code=NEW)
    world.start_all()
    world.restart_supervisor()
    world.answers_comparisons = True
    world.restart_supervisor()
    world.deliver_all()
    assert world.state.stage is Stage.SWITCHING
