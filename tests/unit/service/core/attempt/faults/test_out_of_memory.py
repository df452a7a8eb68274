"""Workers that are killed for lack of memory turn the touching of memory in advance off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.losses import is_out_of_memory
from shoal_service.core.attempt.messages import DeathExplained, StartWorker, WorkerLost
from shoal_workers.contract.job import IncidentCause

NewWorld = Callable[..., Any]


def touching(world: Any) -> list[bool]:
    return [c.touches_memory for c in world.commands if isinstance(c, StartWorker)]


@pytest.mark.parametrize(
    "message",
    [
        "worker 123 was killed by the kernel: out of memory",
        "Task was killed due to the node running low on memory.",
        "ray.exceptions.OutOfMemoryError: ...",
    ],
)
def test_the_words_of_kernel_and_ray_are_known(message: str) -> None:
    assert is_out_of_memory(message)
    assert not is_out_of_memory("killed by signal 9 (SIGKILL)")


def test_after_an_out_of_memory_kill_new_workers_touch_no_memory_in_advance(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=3)
    assert touching(world) == [True, True]
    for index in (1, 2):
        lost = WorkerLost(index, IncidentCause.WORKER_DIED, "run call", "was killed by the kernel: out of memory")
        world.gone(index)
        world.feed(lost)
        world.recover()
        world.run(1)
        world.start_all()
    assert touching(world) == [True, True, False]
    assert [event["worker_id"] for event in world.events("worker.warm_memory_off")] == ["shoal/j1/1/worker-1"], "once"


def test_an_explanation_that_comes_after_the_loss_counts(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=3)
    world.die(1)
    world.deliver_all()
    world.feed(DeathExplained("shoal/j1/1/worker-1", "was killed by the kernel: out of memory"))
    world.recover()
    world.run(1)
    assert touching(world) == [True, True, False]


def test_another_death_leaves_it_on(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=3)
    world.lose(1)
    world.run(1)
    assert touching(world) == [True] * 3 and world.events("worker.warm_memory_off") == []
