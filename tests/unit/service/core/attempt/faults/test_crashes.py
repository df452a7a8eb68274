"""Workers that crash or end themselves at the same place, three groups in a row: the task is at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.attempt.messages import DeathExplained
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import EndReason

PLACE = "in validation, at digits.py:41 in loss()"
SEGMENTATION = f"process 12 on 10.0.0.1 was killed by signal 11 (SIGSEGV) {PLACE}"


NewWorld = Callable[..., Any]


def running(new_world: NewWorld) -> Any:
    world: Any = new_world(workers=6, min_workers=1, retry={"max_recoveries": 50}).open(then=3)
    return world


def crash(world: Any, words: str, *, steps: int = 0, ranks: int = 1) -> None:
    """Workers of the group die, the next group forms, and then their exit status becomes known."""
    dead = [world.state.pool.worker(index).worker_id for index in [*world.state.group.workers][:ranks]]
    for index in [*world.state.group.workers][:ranks]:
        world.die(index)
        world.deliver_all()
    world.until(Stage.RUNNING)
    for worker_id in dead:
        world.feed(DeathExplained(worker_id, words))
    if steps:
        world.run(steps)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_third_crash_in_a_row_at_one_place_ends_the_attempt_in_words(new_world: NewWorld, ranks: int) -> None:
    world = running(new_world)
    for _ in range(3):
        assert world.end is None
        crash(world, SEGMENTATION, ranks=ranks)
    assert world.end is not None and world.end.reason is EndReason.USER_ERROR
    assert world.end.message.startswith(
        "killed by signal 11 (SIGSEGV) in validation after step 3, at digits.py:41 in loss(), 3 times in a row at the "
        "same place, on rank 0; run `shoal check`"
    ), world.end.message
    assert world.end.failure is not None and world.end.failure.mistake == "crash"


@pytest.mark.parametrize("code", [0, 3])
def test_a_task_that_ends_its_process_is_named(new_world: NewWorld, code: int) -> None:
    """`os._exit(0)`: no exception reaches Shoal, and the process has ended as if all were well."""
    world = running(new_world)
    for _ in range(3):
        assert world.end is None
        crash(world, f"process 12 on 10.0.0.1 exited with {code}")
    assert world.end is not None and world.end.reason is EndReason.USER_ERROR
    assert world.end.message == (
        f"exited with {code} after step 3, 3 times in a row at the same place, on rank 0; run `shoal check`, and "
        "look for os._exit in the task and in the libraries that it calls."
    )
    assert world.end.failure is not None and world.end.failure.mistake == "process_exit"


@pytest.mark.parametrize(
    ("words", "mistake", "advice"),
    [
        ("killed by the kernel: out of memory", "no_memory", "lower batch.micro_size, or give the workers more memory"),
        ("killed by signal 14 (SIGALRM)", "crash", "look at the native code that is called there"),
        ("killed by signal 24 (SIGXCPU)", "crash", "look at the native code that is called there"),
        ("killed by signal 34", "crash", "look at the native code that is called there"),
    ],
)
def test_lack_of_memory_and_signals_of_its_own_are_ends_of_the_task(
    new_world: NewWorld, words: str, mistake: str, advice: str
) -> None:
    world = running(new_world)
    for _ in range(3):
        assert world.end is None
        crash(world, f"process 12 on 10.0.0.1 was {words}")
    assert world.end is not None and world.end.reason is EndReason.USER_ERROR
    assert world.end.message == (
        f"{words} after step 3, 3 times in a row at the same place, on rank 0; run `shoal check`, and {advice}."
    )
    assert world.end.failure is not None and world.end.failure.mistake == mistake


def test_a_process_that_ends_itself_now_and_then_is_replaced(new_world: NewWorld) -> None:
    world = running(new_world)
    for steps in (5, 5, 0):
        crash(world, "process 12 on 10.0.0.1 exited with 0", steps=steps)
    assert world.end is None


def test_a_signal_from_outside_is_no_crash(new_world: NewWorld) -> None:
    world = running(new_world)
    for words in [*["9 (SIGKILL)"] * 4, *["15 (SIGTERM)"] * 4]:
        crash(world, f"process 12 on 10.0.0.1 was killed by signal {words}")
    assert world.end is None


def test_crashes_at_different_places_or_steps_do_not_add_up(new_world: NewWorld) -> None:
    world = running(new_world)
    other = SEGMENTATION.replace("41", "52")
    for words in (SEGMENTATION, SEGMENTATION, other, SEGMENTATION):
        crash(world, words)
    crash(world, SEGMENTATION, steps=5)
    crash(world, SEGMENTATION, steps=5)
    assert world.end is None
