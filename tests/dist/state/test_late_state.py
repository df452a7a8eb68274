"""Parameters without optimizer state: those without a gradient yet. Whatever interrupts the run, their state begins
with their first gradient, as in plain torch, and is bit for bit that of the run that nothing has interrupted.

steps                       1   2   3   4   5   6   7   8   9  10
late head is used                                   x   x       x       its state has 3 updates in the end
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds.snapshot_spec import snapshot_spec
from kit.worlds.whole_states import assert_same_bits, whole
from shoal_workers.contract.worker_reports import GroupFormed

STEPS = 10
LATE = [6, 7, 9]
TASKS = ["Late", "LateOwnAdamW", "LateMomentum", "LateRule", "LateGrowth"]


def _spec(task: str, **changes: Any) -> dict[str, Any]:
    spec = snapshot_spec(STEPS)
    spec["optimizer"] = {"lr": 0.05}
    return {**spec, "task": f"late_tasks:{task}", "data": {"late": LATE}, **changes}


@pytest.fixture(scope="module")
def _undisturbed() -> dict[tuple[str, int], dict[str, Any]]:
    return {}


@pytest.fixture
def undisturbed(make_job: Any, reference: Any, _undisturbed: Any) -> Any:
    """`undisturbed(task, world_size)`: the state before the last step, which does use the late head."""

    def state(task: str, world_size: int) -> dict[str, Any]:
        if (task, world_size) not in _undisturbed:
            spec = _spec(task)
            job = make_job(f"undisturbed-{task}", memory=True, **spec)
            workers = job.workers(world_size)
            for worker in workers:
                worker.strike("forward", STEPS - 1, "dump")
            job.finish(workers)
            assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), abs=1e-5)
            _undisturbed[task, world_size] = whole([worker.dumped() for worker in workers])
        return _undisturbed[task, world_size]

    return state


def _finish(job: Any, group: list[Any], **restore: Any) -> dict[str, Any]:
    """Train to the end. The state before the last step."""
    for worker in group:
        worker.strike("forward", STEPS - 1, "dump")
    job.finish(group, **restore)
    return whole([worker.dumped() for worker in group])


def _kill_one(job: Any, group: list[Any], phase: str, step: int, **changes: Any) -> Any:
    """The last rank dies; the others' source."""
    group[-1].strike(phase, step, "kill")
    job.start(group, **changes)
    assert group[-1].died()
    return job.in_memory(job.interrupt(group[:-1]), group[:-1])


@pytest.mark.parametrize("step", [4, 7, 9])
@pytest.mark.parametrize("task", TASKS)
def test_a_killed_worker_is_replaced_before_and_after_the_state_appears(
    make_job: Any, undisturbed: Any, task: str, step: int
) -> None:
    job = make_job(memory=True, **_spec(task))
    *group, spare = job.workers(3)
    source = _kill_one(job, group, "backward", step)
    assert source.step == step
    state = _finish(job, [group[0], spare], restore_snapshot=source)
    assert not [name for name in state if name.startswith("optim.spare.")]
    assert_same_bits(undisturbed(task, 2), state)


def test_state_from_the_beginning_stays_that_of_every_parameter(make_job: Any, undisturbed: Any) -> None:
    job = make_job(memory=True, **_spec("LateAdagrad"))
    *group, spare = job.workers(3)
    source = _kill_one(job, group, "backward", 4)
    state = _finish(job, [group[0], spare], restore_snapshot=source)
    assert "optim.spare.weight.sum" in state
    assert_same_bits(undisturbed("LateAdagrad", 2), state)


@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("step", [4, 7])
def test_only_some_ranks_use_the_late_head(make_job: Any, reference: Any, step: int) -> None:
    """Before the vote the spare head has zeros for a gradient: it is never updated."""
    spec = _spec("Late", data={"late": LATE, "partly": True})
    job = make_job(memory=True, **spec)
    here, there = job.workers(1, "n1"), job.workers(1, "n2")
    group = [*here, *there]
    for worker in group:
        worker.strike("forward", step, "hold")
    generation = job.start(group, buddy_of=lambda rank: group[1 - rank])
    for worker in group:
        worker.reached()
    there[0].kill()
    assert there[0].died()
    here[0].call("interrupt", generation)
    here[0].call("go")
    source = job.in_memory([here[0].exit()], here)
    assert 0 < source.step <= step
    state = _finish(job, here, restore_snapshot=source)
    assert not [name for name in state if name.startswith("optim.spare.")]
    assert job.losses(here) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


@pytest.mark.parametrize("task", ["Late", "LateMomentum"])
def test_a_survivor_that_is_ahead_loses_the_state_that_had_appeared(make_job: Any, undisturbed: Any, task: str) -> None:
    """One rank dies before the update in which the state appears, and the other has made it."""
    job = make_job(memory=True, **_spec(task))
    *group, spare = job.workers(3)
    group[1].strike("optimizer", 6, "stop")
    group[0].strike("forward", 7, "hold")
    generation = job.start(group)
    for worker in group:
        worker.reached()
    group[1].kill()
    assert group[1].died()
    group[0].call("interrupt", generation)
    group[0].call("go")
    source = job.in_memory([group[0].exit()], [group[0]])
    assert source.step == 6
    assert_same_bits(undisturbed(task, 2), _finish(job, [group[0], spare], restore_snapshot=source))


@pytest.mark.parametrize("task", ["Late", "LateMomentum"])
def test_the_state_that_appears_is_in_shared_memory_like_all_other(
    make_job: Any, reference: Any, tmp_path: Path, task: str
) -> None:
    """Also in the generation after it, whose slots have room for what may still appear."""
    spec = _spec(task)
    job = make_job(memory=True, **spec)
    workers = job.workers(3)
    first = _kill_one(job, workers, "backward", 8)
    second = _kill_one(job, workers[:2], "backward", 9, restore_snapshot=first)
    assert (first.step, second.step) == (8, 9)
    assert list(tmp_path.rglob("own-live-*"))
    assert not list(tmp_path.rglob("own-[0-9]*")), "nothing was copied"
    _finish(job, workers[:1], restore_snapshot=second)
    assert job.losses(workers[:1]) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_from_before_the_first_gradient_is_resumed_in_any_layout(
    make_job: Any, reference: Any, undisturbed: Any, task: str
) -> None:
    """On disk: 2 -> 1 -> 3 workers; each has its own process, which knows nothing of the others."""
    spec = _spec(task, checkpoint={"every_steps": 4})
    job = make_job(**spec)
    group = job.workers(2)
    group[1].strike("backward", 5, "hold")
    job.start(group)
    group[1].reached()
    job.wait_until_committed(group, 4)
    for worker in group:
        worker.kill()
    (alone,) = job.workers(1)
    alone.strike("backward", 8, "hold")
    job.start([alone])
    alone.reached()
    job.wait_until_committed([alone], 8)
    alone.kill()
    three = job.workers(3)
    state = _finish(job, three)
    formed = [one.start_step for worker in (alone, *three) for one in worker.reports if isinstance(one, GroupFormed)]
    assert formed == [4, 8]
    assert state.keys() == undisturbed(task, 2).keys()
    assert job.losses([*group, alone, *three]) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


@pytest.mark.parametrize(("step", "expected"), [(5, 5), (9, 9)])
@pytest.mark.parametrize("task", ["Late", "LateMomentum", "LateRule"])
def test_a_lost_node_goes_back_with_parameters_that_have_no_gradient(
    make_job: Any, undisturbed: Any, task: str, step: int, expected: int
) -> None:
    job = make_job(memory=True, **_spec(task))
    here, there = job.workers(1, "n1"), job.workers(1, "n2")
    group = [*here, *there]
    for worker in group:
        worker.strike("forward", step, "hold")
    generation = job.start(group, buddy_of=lambda rank: group[1 - rank])
    for worker in group:
        worker.reached()
    there[0].kill()
    assert there[0].died()
    here[0].call("interrupt", generation)
    here[0].call("go")
    source = job.in_memory([here[0].exit()], here)
    assert source.step <= expected
    spare = job.workers(1, "n3")
    assert_same_bits(undisturbed(task, 2), _finish(job, [*here, *spare], restore_snapshot=source))


def test_a_rank_without_any_part_of_the_model_trains_and_is_lost(make_job: Any, reference: Any) -> None:
    spec = _spec("FewRows")
    job = make_job(memory=True, **spec)
    group = job.workers(4)
    source = _kill_one(job, group, "backward", 5)
    _finish(job, group[:3], restore_snapshot=source)
    assert job.losses(group) == pytest.approx(reference(STEPS, **spec), abs=1e-5)
