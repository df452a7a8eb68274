"""Training is complete and its result cannot be saved: the save is retried for a bounded time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.messages import ReportArrived
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SaveFailed

NewWorld = Callable[..., Any]


def commit_fails(world: Any) -> None:
    world.train(max(1, world.total_steps - world.group()[0].step))
    world.deliver_all()
    world.answer_storage(ok=False)


def part_fails(world: Any) -> None:
    world.train(max(1, world.total_steps - world.group()[0].step))
    world.pending.pop("reports-1", None)
    world.post("reports-1", _failed_part(world))


def ranks_fail(world: Any) -> None:
    for worker in world.group():
        worker.step = world.total_steps
        world.leave(worker, ExitKind.STORAGE_FAILED)


@pytest.mark.parametrize("last", [commit_fails, part_fails, ranks_fail])
@pytest.mark.parametrize("memory", [True, False])
def test_a_last_save_that_fails_is_tried_again_for_a_while(
    new_world: NewWorld, last: Callable[[Any], None], memory: bool
) -> None:
    """The retries are bounded, or the last steps would be trained again and again, each counting as progress."""
    world = new_world(workers=2, memory=memory).open(then=11)
    last(world)
    world.deliver_all()
    for waited in (1.0, 2.0, 4.0, 8.0):
        assert world.state.stage is Stage.WAITING and world.end is None
        world.pass_time(waited - 0.25)
        assert world.state.stage is Stage.WAITING
        world.pass_time(0.5)
        world.join()
        last(world)
        world.deliver_all()
    assert world.end.reason is EndReason.STORAGE_FAILED and "not durable" in world.end.message
    assert [e["after_s"] for e in world.events("checkpoint.retried")] == [1.0, 2.0, 4.0, 8.0]


def test_a_last_save_that_succeeds_later_is_a_success(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=11)
    commit_fails(world)
    world.deliver_all()
    world.pass_time(1.25)
    assert world.state.group.source.step == world.total_steps, "no step is done again"
    world.join()
    world.advance()
    world.finish_storage()
    assert world.end.reason is EndReason.FINISHED and world.state.history.steps_lost == 0


def _failed_part(world: Any) -> Any:
    error = "No space left on device"
    failed = SaveFailed(
        generation=world.state.group.generation,
        step=world.total_steps,
        rank=1,
        directory="/checkpoints/j1/x",
        error=error,
    )
    return ReportArrived(1, failed)
