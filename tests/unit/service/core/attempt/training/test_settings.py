"""Changed settings, and the checkpoint of another job: what the machine makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kit.worlds.attempt.parts import TOTAL_STEPS, error_of
from kit.worlds.attempt.world import World
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.mixture_weights import WeightChange
from shoal_workers.contract.spec import StopSpec
from shoal_workers.contract.training_settings import TrainingSettings

NewWorld = Callable[..., World]
NAME = "step-000000000007-a2-g3"
ORIGIN = {"job": "job-a", "step": 7, "checkpoint": NAME, "url": f"/else/job-a/{NAME}"}


def _changed(world: World, **changes: object) -> TrainingSettings:
    return world.state.target.settings.model_copy(update=changes)


def test_changed_settings_take_effect_at_the_next_step_boundary(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    world.direct(settings=_changed(world, lr=0.5, stop=StopSpec(steps=20)))
    assert world.state.stage is Stage.SWITCHING
    words = "optimizer.lr 0.0003 -> 0.5, stop.steps 12 -> 20"
    assert world.events("generation.switching")[0]["reason"] == words
    world.run(1)
    world.join()
    assert [worker.run.settings for worker in world.group()] == [world.state.target.settings] * 2
    (applied,) = world.events("generation.settings")
    assert (applied["step"], ", ".join(applied["changes"])) == (4, words)
    assert world.state.history.steps_lost == 0 and world.incidents() == []


def test_weights_that_change_at_a_later_step_are_known_to_the_group_from_the_next_boundary_on(
    new_world: NewWorld,
) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    change = WeightChange(at_step=9, weights={"web": 0.5, "chats": 0.5})
    world.direct(settings=_changed(world, weight_changes=(change,)))
    assert world.state.stage is Stage.SWITCHING
    world.run(1)
    world.join()
    assert [worker.run.settings.weight_changes for worker in world.group()] == [(change,)] * 2
    (applied,) = world.events("generation.settings")
    assert (applied["step"], applied["changes"]) == (
        4,
        ["data.weights from step 9 on none -> web 0.5, chats 0.5"],
    )


def test_the_same_settings_change_nothing(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    assert world.direct(settings=_changed(world)) == ()
    assert world.state.stage is Stage.RUNNING


def test_a_change_of_a_group_that_was_lost_before_it_formed_is_reported_by_the_next(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    world.direct(settings=_changed(world, lr=0.5))
    world.run(1)
    assert world.state.stage is Stage.FORMING
    world.die(1)
    for _ in range(6):
        world.cooperate()
    assert [event["changes"] for event in world.events("generation.settings")] == [["optimizer.lr 0.0003 -> 0.5"]]


def test_a_job_whose_end_moves_during_its_last_step_goes_on(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=TOTAL_STEPS - 1)
    world.direct(settings=_changed(world, stop=StopSpec(steps=20)))
    world.train(1)  # the last step of the old settings
    world.deliver_all()
    world.finish_storage()
    assert world.end is None and world.state.stage is Stage.FORMING
    world.total_steps = 20
    for _ in range(12):
        world.cooperate()
        world.train(1)
    assert world.end is not None and world.end.reason is EndReason.FINISHED
    assert world.end.step == 20


def test_the_first_group_of_a_job_restores_the_checkpoint_of_the_other_job(new_world: NewWorld) -> None:
    world = new_world(workers=2, continue_from=ORIGIN).open()
    world.start_all()
    assert [worker.run.restore_from for worker in world.group()] == [ORIGIN["url"]] * 2
    assert world.state.checkpoints.durable_step == 7 and world.state.checkpoints.newest is None
    assert world.events("generation.forming")[0]["restore"] == ORIGIN["url"]


@pytest.mark.parametrize("before", ["", "a1"])
def test_a_job_that_goes_on_with_other_data_says_so(before: str, new_world: NewWorld) -> None:
    world = new_world(workers=2, continue_from=ORIGIN).open()
    world.data_before = before
    world.start_all()
    world.committed[NAME] = True
    world.join()
    said = [(event["step"], event["before"], event["now"]) for event in world.events("generation.data")]
    assert said == ([(7, "a1", "b2")] if before else [])


@pytest.mark.parametrize("memory", [False, True])
def test_a_damaged_checkpoint_of_the_other_job_ends_the_attempt_in_words(new_world: NewWorld, memory: bool) -> None:
    world = new_world(workers=2, memory=memory, continue_from=ORIGIN).open()
    world.start_all()
    for worker in world.group():
        world.leave(worker, ExitKind.DAMAGED_CHECKPOINT, error_of("DamagedCheckpoint", "a byte is flipped."))
    world.deliver_all()
    assert world.end is not None and world.end.reason is EndReason.DAMAGED_CHECKPOINT
    assert "the checkpoint of job job-a that this job goes on from" in world.end.message
    assert "shoal checkpoints job-a" in world.end.message
