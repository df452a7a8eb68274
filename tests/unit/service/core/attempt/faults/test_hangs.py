"""The group makes no progress: it hangs, and an unresponsive worker is blamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal_service.core.attempt import hangs
from shoal_service.core.attempt.messages import Interrupt, KillWorker, Run
from shoal_service.core.attempt.state.attempt import GroupProgress, essential
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import Phase

NewWorld = Callable[..., Any]
HEALTH = {"hang_factor": 4.0, "hang_floor_s": 3.0}


def running(new_world: NewWorld, **settings: Any) -> Any:
    """A group after six steps of half a second; every rank has stamped progress."""
    world = new_world(workers=3, memory=True, **{"health": HEALTH, **settings}).open(then=6)
    for index in (0, 1, 2):
        world.beat(index, beat=10)
    return world


def poll(world: Any, *indexes: int, stalled_s: float) -> None:
    """These answer a poll: they stand where they stood."""
    for index in indexes:
        world.beat(index, beat=10, stalled_s=stalled_s)


def hang_again(world: Any) -> None:
    for worker in world.group():
        world.beat(worker.index, beat=20)
    world.pass_time(3.25)
    world.recover()


def test_a_stopped_worker_is_replaced_soon_after_the_threshold(new_world: NewWorld) -> None:
    world = running(new_world, standby=1)
    world.stop(1)
    world.pass_time(3.0)
    assert world.state.stage is Stage.RUNNING
    world.pass_time(0.25)
    assert world.state.stage is Stage.QUIESCING and world.count(Interrupt) == 3
    assert world.state.incident.cause is IncidentCause.HUNG and world.state.incident.witness == "progress stamps"
    world.quiesce()
    world.pass_time(Timeouts().unresponsive_s)
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [1]
    assert world.state.stage is Stage.FORMING and world.state.group.workers == (0, 3, 2)
    world.join()
    world.run(1)
    [incident] = world.incidents()
    assert (incident.cause, incident.ranks, incident.steps_lost) == (IncidentCause.HUNG, (1,), 0)
    assert incident.node_id == "n1" and incident.detect_s == pytest.approx(3.25)
    assert incident.action == "restart worker, replace from standby"


def test_a_worker_without_answered_polls_is_not_polled_again(new_world: NewWorld) -> None:
    world = running(new_world)
    world.stop(1)
    for passed in range(1, 4):
        world.pass_time(1.0)
        poll(world, 0, 2, stalled_s=float(passed))
    world.pass_time(0.25)
    assert world.state.stage is Stage.QUIESCING and world.state.incident.cause is IncidentCause.HUNG
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [1], "without another wait"
    assert world.state.incident.ranks == (1,) and world.state.incident.witness == "progress stamps"


def test_missing_reports_alone_are_not_a_hang(new_world: NewWorld) -> None:
    world = running(new_world)
    for beat in range(11, 21):
        world.pass_time(1.0)
        world.beat(0, beat=beat)
    assert world.state.stage is Stage.RUNNING and world.count(KillWorker) == 0


def test_a_late_report_counts_with_the_time_without_progress_that_it_states(new_world: NewWorld) -> None:
    world = running(new_world)
    world.pass_time(1.0)
    for index in (0, 1, 2):
        world.beat(index, beat=11, stalled_s=0.75)
    world.pass_time(2.25)
    assert world.state.stage is Stage.RUNNING, "three seconds since it moved, but for a quarter"
    world.pass_time(0.25)
    assert world.state.stage is Stage.QUIESCING


def test_the_threshold_follows_the_groups_own_pace(new_world: NewWorld) -> None:
    world = running(new_world, health={"hang_factor": 10.0, "hang_floor_s": 1.0})
    world.pass_time(5.0)
    assert world.state.stage is Stage.RUNNING, "ten times half a second"
    world.pass_time(0.25)
    assert "health.hang_factor 10 x 0.5 s" in world.state.incident.message


def test_no_collective_gives_up_before_a_hang_would_have_been_found(new_world: NewWorld) -> None:
    world = running(new_world, health={"hang_factor": 40000.0, "hang_floor_s": 3600.0})

    def given() -> float:
        return next(c.assignment.collective_timeout_s for c in reversed(world.commands) if isinstance(c, Run))

    assert given() == 2 * 3600.0, "the floor, before there is a step to go by"
    world.lose(2)
    assert given() == 2 * 40000.0 * 0.5


def test_progress_of_one_rank_is_enough(new_world: NewWorld) -> None:
    world = running(new_world)
    for beat in range(20):
        world.pass_time(1.0)
        world.beat(2, beat=11 + beat)
    assert world.state.stage is Stage.RUNNING


def test_an_unchanged_progress_counter_is_no_progress(new_world: NewWorld) -> None:
    world = running(new_world)
    for _ in range(4):
        world.pass_time(1.0)
        world.beat(2, beat=10)
    assert world.state.incident is not None


def test_a_progress_counter_of_an_older_generation_is_no_progress(new_world: NewWorld) -> None:
    world = running(new_world)
    world.lose(2)
    world.run(1)
    before = world.state
    run = world.workers[0].run
    world.workers[0].run = run.model_copy(update={"generation": 1})
    world.beat(0, beat=99)
    assert essential(world.state) == essential(before) and world.state.progress.stamps == before.progress.stamps


def test_if_all_ranks_leave_one_is_named_and_none_is_killed(new_world: NewWorld) -> None:
    world = running(new_world)
    world.pass_time(1.0)
    for index in (0, 2):
        world.beat(index, beat=11)
    world.pass_time(3.25)
    assert "rank 1 stood still first, in backward after step 6" in world.state.incident.message
    world.recover()
    assert world.state.stage is Stage.RUNNING and world.world_size == 3 and world.count(KillWorker) == 0
    world.run(1)
    assert world.state.health.hang is None and world.incidents()[0].closed


def test_a_rank_named_twice_at_the_same_step_is_replaced(new_world: NewWorld) -> None:
    world = running(new_world, standby=1)
    world.pass_time(3.25)
    world.recover()
    assert world.state.group.workers == (0, 1, 2)
    hang_again(world)
    assert world.state.group.workers == (3, 1, 2) and world.state.group.source.step == 6
    assert world.count(KillWorker) == 0, "it serves its part until the next group has made a step"
    world.run(1)
    assert [c.index for c in world.commands if isinstance(c, KillWorker)] == [0]
    [incident] = world.incidents()
    assert incident.ranks == (0,) and incident.steps_lost == 0


def test_missing_progress_does_not_count_before_the_first_stamp(new_world: NewWorld) -> None:
    """A restarted supervisor must receive a report of every worker first."""
    world = new_world(workers=2, health=HEALTH).open(then=6)
    world.pass_time(20.0)
    assert world.state.stage is Stage.RUNNING
    world.pass_time(0.25)
    assert "no progress was reported" in world.state.incident.message


def test_a_long_save_is_not_a_hang(new_world: NewWorld) -> None:
    world = running(new_world)
    world.direct(granted=2)
    world.beat(0, beat=11, phase=Phase.SAVING)
    world.pass_time(30.0)
    assert world.state.stage is Stage.SWITCHING
    world.pass_time(10.25)
    assert world.state.stage is Stage.QUIESCING, "but not longer than the switch may take"


@pytest.mark.parametrize("phase", [Phase.SAVING, Phase.COMMITTING])
def test_a_hang_in_a_save_is_found_after_the_limit_of_a_save(new_world: NewWorld, phase: Phase) -> None:
    """The worker itself gives a save up after timeouts.save_s; what lasts longer is not slow storage."""
    world = running(new_world)
    for index in (0, 1, 2):
        world.beat(index, beat=11, phase=phase)
    world.pass_time(150.0)
    assert world.state.stage is Stage.RUNNING
    world.pass_time(0.25)
    assert world.state.incident.cause is IncidentCause.HUNG
    assert "timeouts.save_s 120 s" in world.state.incident.message


def test_a_hang_on_the_way_to_a_boundary_is_seen(new_world: NewWorld) -> None:
    world = running(new_world)
    world.direct(granted=2)
    assert world.state.stage is Stage.SWITCHING
    world.pass_time(3.25)
    assert world.state.incident.cause is IncidentCause.HUNG


def test_progress_and_steps_write_no_journal_entry(new_world: NewWorld) -> None:
    world = running(new_world)
    before = world.state
    world.beat(0, beat=11)
    world.pass_time(0.25)
    world.report(0.1, 0.1, 0.9)
    assert world.state != before and essential(world.state) == essential(before)


def at_pace(new_world: NewWorld, step_s: float, *, slowest_s: float = 0.0, **settings: Any) -> Any:
    """A group with the shipped settings, after six steps; its measured times are replaced."""
    world = new_world(workers=3, memory=True, **{"health": {}, **settings}).open(then=6)
    progress = replace(world.state.progress, step_times=(step_s,) * 6, slowest_steps=(slowest_s or step_s,))
    world.state = replace(world.state, progress=progress)
    for index in (0, 1, 2):
        world.beat(index, beat=10)
    return world


def test_what_stands_still_is_shown_before_it_counts_as_hung(new_world: NewWorld) -> None:
    world = at_pace(new_world, 0.2)
    world.pass_time(0.75)
    for index in (0, 2):
        world.beat(index, beat=11)
    assert not hangs.find_standstill(world.state, world.now)
    world.pass_time(1.25)
    assert hangs.find_standstill(world.state, world.now).reason == (
        "rank 1 has made no progress for 1.2 s, in backward after step 6; the group counts as hung after 3.0 s"
    )


def test_the_slowest_step_of_the_last_thousand_counts_and_is_limited(new_world: NewWorld) -> None:
    assert hangs.threshold_s(at_pace(new_world, 0.2, slowest_s=2.0).state) == 4 * 2.0
    assert hangs.threshold_s(at_pace(new_world, 0.2, slowest_s=60.0).state) == 30.0
    assert hangs.threshold_s(at_pace(new_world, 4.0, slowest_s=60.0).state) == 10 * 4.0


def test_the_slowest_step_is_forgotten_after_a_thousand_steps() -> None:
    progress = hangs.add_step_time(GroupProgress(), 9.0, is_first=False)
    for _ in range(1023 - 64):
        progress = hangs.add_step_time(progress, 0.2, is_first=False)
    assert max(progress.slowest_steps) == 9.0
    for _ in range(65):
        progress = hangs.add_step_time(progress, 0.2, is_first=False)
    assert set(progress.slowest_steps) == {0.2} and len(progress.slowest_steps) == 16


def test_the_first_step_of_a_generation_measures_nothing() -> None:
    progress = hangs.add_step_time(GroupProgress(), 25.0, is_first=True)
    assert progress.slowest_steps == () and progress.num_measured == 0


def test_what_was_not_measured_has_thirty_seconds(new_world: NewWorld) -> None:
    young = new_world(workers=3, memory=True, health={}).open(then=1)
    assert hangs.threshold_s(young.state) >= 30.0, "too few steps are measured"
    world = at_pace(new_world, 0.2)
    world.beat(0, beat=11, phase=Phase.VALIDATING)
    assert hangs.threshold_s(world.state) == 30.0
    world = at_pace(new_world, 0.2)
    world.lose(2)
    world.beat(0, beat=1)
    assert hangs.threshold_s(world.state) == 30.0, "the first step in another layout"


def test_a_group_that_has_trained_before_is_not_waited_for_longer_in_its_first_step(new_world: NewWorld) -> None:
    world = at_pace(new_world, 0.2)
    world.pass_time(3.25)
    world.recover()
    for index in (0, 1, 2):
        world.beat(index, beat=1)
    assert world.state.group.workers == (0, 1, 2) and hangs.threshold_s(world.state) == 3.0
