"""A directive is one document: what differs from the target takes effect, in a fixed order, all in one turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kit.worlds.attempt.parts import directed
from shoal_service.core.attempt.messages import KillWorker, StartWorker
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.desired import Desired
from shoal_workers.contract.fault_tolerance import ElasticitySpec
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.layout import ParallelismSpec

NewWorld = Callable[..., Any]
NEW = "a" * 64


def test_a_document_that_wants_what_the_target_is_changes_nothing(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    before = world.state
    assert world.direct() == ()
    assert world.state == before


def test_a_document_that_comes_twice_takes_effect_once(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    wanted = directed(world.state.target, granted=3, code=NEW)
    started = [command for command in world.feed(wanted) if isinstance(command, StartWorker)]
    assert [command.code for command in started] == [NEW, NEW, ""]
    assert world.feed(wanted) == ()


def test_settings_and_code_that_an_older_control_plane_does_not_send_stay(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    world.direct(code=NEW)
    before = world.state.target
    world.direct(settings=None, code=None)
    assert world.state.target == before


def test_all_that_one_document_changes_is_in_the_target(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    elasticity = ElasticitySpec(min_workers=1, max_workers=4, standby=1)
    world.direct(
        granted=3,
        elasticity=elasticity,
        parallelism=ParallelismSpec(dp_replicate=2),
        pinned=("step-000000000004-a1-g1",),
        server_stops=True,
    )
    target = world.state.target
    assert (target.granted, target.spec.elasticity, target.pinned) == (3, elasticity, ("step-000000000004-a1-g1",))
    assert target.spec.parallelism == ParallelismSpec(dp_replicate=2) and target.server_stops
    assert world.state.stage is Stage.SWITCHING


@pytest.mark.parametrize("desired", [Desired.PAUSE, Desired.CANCEL])
def test_without_a_group_a_preemption_ends_the_attempt_before_anything_else_is_looked_at(
    new_world: NewWorld, desired: Desired
) -> None:
    world = new_world(workers=2)
    world.direct(is_preempted=True, granted=0, desired=desired, server_stops=True)
    assert world.end.reason is EndReason.PREEMPTED
    assert world.state.target.granted == 2 and world.state.target.desired is Desired.RUN


def test_a_cancel_ends_the_attempt_once_although_the_server_stops_as_well(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    commands = world.direct(desired=Desired.CANCEL, server_stops=True)
    assert world.end.reason is EndReason.CANCELLED
    assert sum(isinstance(command, KillWorker) for command in commands) == 2
