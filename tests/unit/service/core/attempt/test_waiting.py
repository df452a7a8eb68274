"""With fewer workers than elasticity.min_workers the attempt waits until a stated deadline and resumes without a
request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_service.core.attempt.messages import StartWorker
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.supervisor.reporting.status import Readings, make_status
from shoal_workers.contract.fault_tolerance import ElasticitySpec
from shoal_workers.contract.job import EndReason, JobState

NewWorld = Callable[..., Any]


def waiting(new_world: NewWorld, **settings: Any) -> Any:
    world = new_world(workers=3, min_workers=3, **settings).open(then=6)
    world.die(1)
    world.quiesce()
    assert world.state.stage is Stage.WAITING
    return world


def test_the_status_states_what_it_waits_for_and_until_when(new_world: NewWorld) -> None:
    world = waiting(new_world)
    status = make_status(world.state, Readings(), spec_version=1, now=world.now)
    assert status.state is JobState.WAITING and status.reason == "min_workers_unreachable"
    assert status.message == "2 of 3 workers ready; the others are starting"
    assert status.deadline == world.now + 30.0
    assert world.events("job.waiting") == [{"warm": 2, "min_workers": 3, "until": world.now + 30.0}]


def test_it_requests_a_replacement_and_resumes_once_it_is_warm(new_world: NewWorld) -> None:
    world = waiting(new_world)
    assert world.count(StartWorker) == 4
    world.pass_time(20.0)
    world.start_all()
    world.join()
    world.run(1)
    assert world.state.stage is Stage.RUNNING and world.state.group.workers == (0, 3, 2)
    [incident] = world.incidents()
    assert incident.closed and incident.steps_lost == 2 and incident.recovery_s == 20.0


def test_after_the_deadline_it_gives_up(new_world: NewWorld) -> None:
    world = waiting(new_world)
    world.pass_time(30.1)
    assert world.end.reason is EndReason.CAPACITY_TIMEOUT
    assert "2 of at least 3 workers (elasticity.min_workers) for 30 s (elasticity.wait_s)" in world.end.message


def test_a_lower_minimum_lets_it_go_on_with_what_is_there(new_world: NewWorld) -> None:
    world = waiting(new_world)
    world.direct(elasticity=ElasticitySpec(min_workers=2, max_workers=3))
    world.pass_time(3.0)
    assert world.state.stage is Stage.FORMING and world.world_size == 2


def test_survivors_that_die_during_the_wait_are_replaced(new_world: NewWorld) -> None:
    world = waiting(new_world)
    world.die(0)
    world.deliver_all()
    assert world.state.stage is Stage.WAITING and world.count(StartWorker) == 5
    world.start_all()
    assert world.state.stage is Stage.FORMING and world.state.group.workers == (3, 4, 2)
