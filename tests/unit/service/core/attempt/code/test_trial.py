"""Hot update of the code, from the take-over on: when it is accepted, and when and to which state it is rolled back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kit.worlds.attempt.world import World
from shoal_service.core.attempt.code_update import TRIAL_S, TRIAL_STEPS
from shoal_service.core.attempt.messages import Commit, ReportArrived
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.desired import Desired
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase
from shoal_workers.contract.worker_reports import StepReport, StepSkipped

NewWorld = Callable[..., World]
OLD, NEW = "", "a" * 64
ERROR = ErrorReport(type="ValueError", message="a new mistake", traceback="tb", phase=Phase.FORWARD)


@pytest.fixture
def world(new_world: NewWorld) -> World:
    """The new code has taken over after step 7."""
    world = new_world(workers=2, memory=True).open(then=6)
    world.total_steps = 60
    world.direct(code=NEW)
    world.start_all()
    world.run(1)
    world.join()
    assert world.state.code.trial is not None and world.state.group.start_step == 7
    return world


def codes_of_the_group(world: World) -> set[str]:
    return {world.state.pool.worker(index).code for index in world.state.group.workers}


def step(world: World, step_s: float) -> None:
    group = world.group()
    for worker in group:
        worker.step += 1
    world.states.add((group[0].run.generation, group[0].step))
    world.snapshot()
    report = StepReport(
        generation=group[0].run.generation,
        step=group[0].step,
        at=world.now,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=1,
        step_s=step_s,
        world_size=len(group),
    )
    world.send(group[0], report)
    world.deliver_all()


def pass_the_trial(world: World, step_s: float = 0.1) -> None:
    world.now += TRIAL_S
    for _ in range(TRIAL_STEPS + 1):
        step(world, step_s)


def next_group(world: World) -> None:
    world.deliver_all()
    world.join()


def test_it_is_accepted_after_some_steps_and_the_workers_with_the_code_before_end(world: World) -> None:
    assert {p.code for p in world.state.pool.workers} == {OLD, NEW}
    pass_the_trial(world)
    (updated,) = world.events("code.updated")
    assert (updated["version"], updated["step"], updated["pause_s"]) == (NEW, 7, 0.0)
    assert {p.code for p in world.state.pool.workers} == {NEW} and world.state.code.current == NEW


def test_it_is_not_accepted_before_its_time(world: World) -> None:
    for _ in range(TRIAL_STEPS + 1):
        step(world, 0.001)
    assert world.events("code.updated") == []


@pytest.mark.parametrize("kind", [ExitKind.USER_ERROR, ExitKind.ENGINE_ERROR, ExitKind.NON_FINITE])
def test_code_that_fails_is_rolled_back_to_the_step_of_its_take_over(world: World, kind: ExitKind) -> None:
    step(world, 0.1)
    for worker in world.group():
        world.leave(worker, kind, ERROR)
    next_group(world)
    assert codes_of_the_group(world) == {OLD} and world.state.stage is Stage.RUNNING
    assert world.state.group.start_step == 7 and world.state.progress.step == 7
    (event,) = world.events("code.rolled_back")
    assert (event["version"], event["step"]) == (NEW, 7) and "a new mistake" in event["reason"]
    assert world.state.history.steps_lost == 0 and world.state.history.skip_steps == () and world.end is None
    world.run(1)
    assert {p.code for p in world.state.pool.workers} == {OLD}, "the workers with the new code end"
    world.pass_time(5)
    assert world.events("code.updating") == [{"version": NEW, "before": OLD}], "it is not tried again by itself"


def test_code_that_fails_while_it_builds_its_model_is_rolled_back(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=6)
    world.direct(code=NEW)
    world.start_all()
    world.run(1)
    for worker in world.group():
        world.leave(worker, ExitKind.USER_ERROR, ERROR)
    next_group(world)
    assert codes_of_the_group(world) == {OLD} and world.state.group.start_step == 7


def test_a_worker_that_dies_in_the_new_code_rolls_it_back(world: World) -> None:
    step(world, 0.1)
    world.lose(world.group()[1].index)
    assert codes_of_the_group(world) == {OLD} and world.state.group.start_step == 7
    world.run(1)
    (incident,) = world.incidents()
    assert incident.cause is IncidentCause.WORKER_DIED and incident.closed


def test_the_loss_of_a_node_is_not_the_fault_of_the_code(world: World) -> None:
    step(world, 0.1)
    world.die_node(world.group()[1].node_id)
    world.recover()
    assert world.events("code.rolled_back") == [] and codes_of_the_group(world) == {NEW}
    assert world.state.code.trial is not None


def test_slower_code_gives_way_at_a_step_boundary_and_its_steps_are_kept(world: World) -> None:
    pass_the_trial(world, step_s=0.8)
    assert world.state.stage is Stage.SWITCHING and world.events("code.updated") == []
    world.run(1)
    done = world.state.progress.step
    world.join()
    assert codes_of_the_group(world) == {OLD} and world.state.group.start_step == done
    (event,) = world.events("code.rolled_back")
    assert event["step"] == done and "times that of the code before" in event["reason"]
    assert world.state.history.steps_lost == 0


def test_a_skipped_step_that_is_not_finite_rolls_back_to_the_step_of_the_take_over(world: World) -> None:
    step(world, 0.1)
    first = world.group()[0]
    skipped = StepSkipped(generation=first.run.generation, step=9, at=world.now, loss=None, grad_norm=None)
    world.feed(ReportArrived(first.index, skipped))
    assert world.state.stage is Stage.SWITCHING
    world.run(1)
    world.join()
    assert codes_of_the_group(world) == {OLD} and world.state.group.start_step == 7


def test_a_checkpoint_of_new_code_is_committed_only_once_it_is_accepted(world: World) -> None:
    before = world.count(Commit)
    step(world, 0.1)
    world.save()
    world.deliver_all()
    assert world.count(Commit) == before
    pass_the_trial(world)
    assert world.count(Commit) == before + 1


def test_a_job_that_ends_during_the_trial_has_accepted_the_code(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=9)
    world.direct(code=NEW)
    world.start_all()
    world.run(1)
    world.join()
    world.until(Stage.RUNNING)
    for _ in range(4):
        world.run(1)
    assert world.end is not None and world.end.reason == "finished"
    assert len(world.events("code.updated")) == 1


def test_a_pause_during_the_trial_saves_what_the_new_code_has_trained(world: World) -> None:
    step(world, 0.1)
    world.direct(desired=Desired.PAUSE)
    world.until(Stage.ENDED)
    assert world.end is not None and world.end.reason == "paused" and world.events("code.rolled_back") == []


def test_a_restarted_supervisor_goes_on_with_the_trial(world: World) -> None:
    step(world, 0.1)
    world.restart_supervisor()
    pass_the_trial(world)
    assert len(world.events("code.updated")) == 1
