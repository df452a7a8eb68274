"""From the first search of the storage to the first step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from shoal_service.core.attempt.messages import FindCheckpoint, Run, StartWorker, StorageAway, StorageUnusable
from shoal_service.core.attempt.state.parts import Stage
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import Phase

NewWorld = Callable[..., Any]


def test_the_storage_is_searched_before_any_worker_starts(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    assert world.commands == [FindCheckpoint()]
    world.open()
    assert world.state.stage is Stage.STARTING
    assert world.count(StartWorker) == 2


def test_the_group_forms_once_every_granted_worker_is_warm(new_world: NewWorld) -> None:
    world = new_world(workers=3).open()
    for index in (0, 1):
        world.start(index)
        world.deliver_all()
    assert world.state.stage is Stage.STARTING
    world.start(2)
    world.deliver_all()
    assert world.state.stage is Stage.FORMING and world.world_size == 3
    world.join()
    assert world.state.stage is Stage.RUNNING
    world.run(1)
    assert world.state.progress.step == 1


def test_a_smaller_group_forms_after_the_settle_time(new_world: NewWorld) -> None:
    world = new_world(workers=3, min_workers=2).open()
    for index in (0, 1):
        world.start(index)
    world.deliver_all()
    world.pass_time(2.9)
    assert world.state.stage is Stage.STARTING
    world.pass_time(0.1)
    assert world.state.stage is Stage.FORMING and world.world_size == 2


def test_below_min_workers_no_group_forms_at_any_time(new_world: NewWorld) -> None:
    world = new_world(workers=3, min_workers=2).open()
    world.start(0)
    world.deliver_all()
    world.pass_time(59.9)
    assert world.state.stage is Stage.STARTING
    world.pass_time(0.1)
    assert world.end.reason is EndReason.CAPACITY_TIMEOUT
    assert "only 1 of at least 2" in world.end.message


def test_spare_workers_above_the_grant_do_not_train(new_world: NewWorld) -> None:
    """With a grant below min_workers the standbys alone could never train, so the deadline holds."""
    world = new_world(workers=1, min_workers=2, standby=2).open()
    world.start_all()
    assert world.state.stage is Stage.STARTING
    world.pass_time(60.1)
    assert world.end.reason is EndReason.CAPACITY_TIMEOUT


def test_standbys_are_kept_warm_beside_the_group(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=1).open(then=1)
    assert world.world_size == 2 and len(world.state.pool.warm) == 3


def test_an_attempt_resumes_from_what_the_storage_holds(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    world.committed["step-000000000004-a0-g3"] = True
    world.open(then=1)
    assert world.state.progress.step == 5
    assert world.state.history.steps_lost == 0


def test_every_run_call_of_a_generation_names_rank_zeros_store(new_world: NewWorld) -> None:
    world = new_world(workers=3).open(then=0)
    runs = [c.assignment for c in world.commands if isinstance(c, Run)]
    assert {(run.store_host, run.store_port) for run in runs} == {("10.0.0.1", 5000)}


def test_a_task_that_cannot_be_loaded_ends_the_attempt(new_world: NewWorld) -> None:
    world = new_world(workers=2).open()
    world.fail_to_start(1)
    world.deliver_all()
    assert world.end.reason is EndReason.USER_ERROR
    assert world.end.failure.type == "ImportError" and world.end.failure.phase == Phase.PREPARING


def test_a_new_worker_that_cannot_load_the_task_does_not_harm_the_group(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=5)
    world.lose(1)
    world.run(1)
    assert world.state.stage is Stage.RUNNING and world.world_size == 1
    newcomer = world.state.pool.workers[-1].index
    world.fail_to_start(newcomer)
    world.deliver_all()
    assert world.state.stage is Stage.RUNNING
    assert world.events("worker.start_failed")[0]["error"] == "ImportError: no torchvision"
    assert world.state.pool.worker(newcomer) is None
    started = world.count(StartWorker)
    world.pass_time(29.0)
    assert world.count(StartWorker) == started, "the next one is tried later"
    world.pass_time(2.0)
    assert world.count(StartWorker) == started + 1


def test_a_worker_that_dies_while_starting_is_replaced(new_world: NewWorld) -> None:
    world = new_world(workers=2).open()
    world.die(0)
    world.deliver_all()
    assert world.count(StartWorker) == 3
    world.start_all()
    assert world.state.stage is Stage.FORMING and world.state.group.workers == (1, 2)
    assert world.incidents() == []


def test_starts_that_fail_in_a_row_end_the_attempt(new_world: NewWorld) -> None:
    world = new_world(workers=2).open()
    for _ in range(6):
        world.die(world.state.pool.workers[0].index)
        world.deliver_all()
    assert world.end.reason is EndReason.START_FAILED
    assert "6 workers in a row" in world.end.message and "signal 9" in world.end.message


def test_one_good_start_forgives_the_bad_ones_before_it(new_world: NewWorld) -> None:
    world = new_world(workers=2, min_workers=2).open()
    for _ in range(5):
        world.die(world.state.pool.workers[-1].index)
        world.deliver_all()
    world.start(world.state.pool.workers[0].index)
    world.deliver_all()
    world.die(world.state.pool.workers[-1].index)
    world.deliver_all()
    assert world.state.stage is Stage.STARTING and world.state.budgets.failed_starts == 1


def test_beside_a_running_group_failing_starts_are_tried_ever_more_slowly(new_world: NewWorld) -> None:
    """Otherwise a broken node would get new workers as fast as they die, until the end of the job."""
    world = new_world(workers=2).open(then=5)
    world.lose(1)
    world.run(1)
    before = world.count(StartWorker)
    for _ in range(100):
        starting = [p for p in world.state.pool.workers if not p.warm]
        for worker in starting:
            world.die(worker.index)
        world.deliver_all()
        world.pass_time(1.0)
    assert world.state.stage is Stage.RUNNING
    assert world.count(StartWorker) - before <= 7


def test_storage_that_cannot_be_written_ends_the_attempt_before_it_costs_anything(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    world.feed(StorageUnusable("/checkpoints is read-only"))
    assert world.end.reason is EndReason.STORAGE_FAILED
    assert world.count(StartWorker) == 0


def test_storage_that_does_not_answer_ends_the_attempt_at_its_deadline(new_world: NewWorld) -> None:
    world = new_world(workers=2, checkpoint={"wait_s": 20.0})
    world.pass_time(20.0)
    assert world.end is None
    world.pass_time(0.25)
    assert world.end.reason is EndReason.STORAGE_FAILED
    assert "did not answer for 20 s (checkpoint.wait_s is 20)" in world.end.message


def test_a_storage_outage_at_the_start_is_not_final(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    asked_at = []
    for _ in range(5):
        asked_at.append(world.now)
        [find] = world.finds
        world.finds = []
        world.feed(StorageAway("TimeoutError: no answer"))
        world.feed(StorageAway("TimeoutError: no answer"))  # the answer to a repeated request
        while not world.finds:
            world.pass_time(0.25)
        assert world.finds == [find]
    assert [later - earlier for earlier, later in pairwise(asked_at)] == [1.0, 2.0, 4.0, 8.0]
    assert [event["message"] for event in world.events("checkpoint.storage_away")] == ["TimeoutError: no answer"]
    world.open(then=1)
    assert world.end is None and world.state.progress.step == 1


def test_a_restarted_supervisor_keeps_the_pause_before_the_next_request(new_world: NewWorld) -> None:
    world = new_world(workers=2)
    world.finds = []
    world.feed(StorageAway("TimeoutError: no answer"))
    world.restart_supervisor()
    assert world.finds == []
    world.pass_time(1.0)
    assert len(world.finds) == 1
    world.restart_supervisor()
    assert len(world.finds) == 1, "the request is repeated, since its answer was lost"
