"""What the machine makes of validations."""

from __future__ import annotations

from collections.abc import Callable

from kit.worlds.attempt.world import World
from shoal_service.core.attempt.scripts import find_rules
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.worker_reports import ValidationReport

NewWorld = Callable[..., World]


def _validated(world: World, step: int, loss: float, **metrics: float) -> None:
    report = ValidationReport(
        generation=world.state.group.generation,
        step=step,
        at=world.now,
        loss=loss,
        bits_per_byte=None,
        samples=1,
        metrics=metrics,
    )
    world.send(world.group()[0], report)
    world.deliver_all()


def test_patience_ends_the_run_once_and_the_message_says_why(new_world: NewWorld) -> None:
    world = new_world(workers=2, validation={"every_steps": 1, "patience": 2}).open(then=3)
    for step, loss in ((1, 3.0), (2, 3.5), (3, 3.1), (3, 2.0)):
        _validated(world, step, loss)
    assert [event["step"] for event in world.events("validation.stopped_early")] == [3]
    assert world.state.is_finishing
    assert world.state.history.standing is not None and world.state.history.standing.num_since == 2
    message = find_rules(world.state).describe_finish(world.state)
    assert message.startswith("stopped early after 3 steps: validation loss did not improve on 3 in 2 validations")


def test_the_next_group_and_the_journal_know_what_validations_have_shown(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True, checkpoint={"keep_best": 2}).open(then=2)
    _validated(world, 2, 3.0)
    world.die(1)
    world.deliver_all()
    world.until(Stage.RUNNING)
    standing = world.group()[0].run.standing
    assert standing is not None and standing == world.state.history.standing and standing.kept_steps == (2,)


def test_a_metric_that_the_task_does_not_have_is_named(new_world: NewWorld) -> None:
    world = new_world(workers=2, validation={"metric": "f1", "patience": 2}).open(then=1)
    _validated(world, 1, 3.0, accuracy=0.5)
    assert world.events("validation.not_judged") == [{"step": 1, "metric": "f1", "known": ["accuracy"]}]
