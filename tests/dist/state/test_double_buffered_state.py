"""The double-buffered state in shared memory: a death costs at most one complete step, and no copy is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds.snapshot_spec import snapshot_spec
from shoal_workers.contract.worker_reports import GroupFormed

STEPS = 8
SPEC = snapshot_spec(STEPS)


def _assert_nothing_was_copied(directory: Path) -> None:
    assert list(directory.rglob("own-live-*"))
    assert not list(directory.rglob("own-[0-9]*"))


@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_state_of_a_killed_rank_is_restored_without_a_snapshot_copy(
    make_job: Any, reference: Any, tmp_path: Path, phase: str
) -> None:
    job = make_job(memory=True, **SPEC)
    workers = job.workers(4)
    victim, survivors = workers[1], [workers[0], *workers[2:]]
    victim.strike(phase, 5, "kill")
    job.start(workers)
    assert victim.died()
    _assert_nothing_was_copied(tmp_path)
    exits = job.interrupt(survivors)
    source = job.in_memory(exits, survivors)
    assert source.step in (4, 5), "a survivor may not have ended the step before"
    job.finish(survivors, restore_snapshot=source)
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_the_state_that_survives_two_deaths_in_a_row_is_the_source_both_times(
    make_job: Any, reference: Any, tmp_path: Path
) -> None:
    """The second death comes before the smaller group has completed a step; the state that it read is whole."""
    job = make_job(memory=True, **SPEC)
    workers = job.workers(4)
    workers[3].strike("backward", 5, "kill")
    job.start(workers)
    assert workers[3].died()
    exits = job.interrupt(workers[:3])
    first = job.in_memory(exits, workers[:3])
    workers[2].strike("backward", 5, "kill")
    job.start(workers[:3], restore_snapshot=first)
    assert workers[2].died()
    _assert_nothing_was_copied(tmp_path)
    exits = job.interrupt(workers[:2])
    second = job.in_memory(exits, workers[:2])
    assert (second.generation, second.step) == (first.generation + 1, 5)
    job.finish(workers[:2], restore_snapshot=second)
    assert job.losses(workers[:2]) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_survivors_read_nothing_if_the_layout_does_not_change(make_job: Any, reference: Any, tmp_path: Path) -> None:
    job = make_job(memory=True, **SPEC)
    *workers, spare = job.workers(4)
    workers[1].strike("backward", 4, "kill")
    job.start(workers)
    assert workers[1].died()
    _assert_nothing_was_copied(tmp_path)
    exits = job.interrupt([workers[0], workers[2]])
    group = [workers[0], spare, workers[2]]
    source = job.in_memory(exits, group)
    workers[0].strike("restoring", 0, "dump")
    workers[0].strike("forward", 4, "dump")
    job.finish(group, restore_snapshot=source)
    before, after = workers[0].dumped(), workers[0].dumped()
    for name, (_, _, values) in before.items():
        assert (values == after[name][2]).all(), name
    (formed,) = [item for item in job.reported(group, GroupFormed) if item.generation == job.generation]
    whole = sum(values.nbytes for _, _, values in before.values())
    assert formed.start_step == 4
    assert 0 < formed.restored_bytes < 2 * whole, "the spare's part, and what every rank has a copy of"
    assert job.losses(group) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


@pytest.mark.parametrize("action", ["stop", "kill within"])
def test_a_step_is_repeated_if_one_rank_dies_before_completing_it(
    make_job: Any, reference: Any, tmp_path: Path, action: str
) -> None:
    """Between the vote and the end of the update: the survivors are a step ahead, and still have the one before."""
    job = make_job(memory=True, **SPEC)
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    victim.strike("optimizer", 5, action)
    for worker in survivors:
        worker.strike("forward", 6, "hold")
    generation = job.start(workers)
    for worker in (victim, *survivors) if action == "stop" else survivors:
        worker.reached()
    victim.kill()
    assert victim.died()
    _assert_nothing_was_copied(tmp_path)
    for worker in survivors:
        worker.call("interrupt", generation)
        worker.call("go")
    exits = job.interrupt(survivors)
    held = {(one.rank, one.step) for end in exits for one in end.snapshot_parts}
    assert held >= {(0, 5), (0, 6), (2, 5), (2, 6)}
    assert {step for rank, step in held if rank == 1} == ({4, 5} if action == "stop" else {5})
    source = job.in_memory(exits, survivors)
    assert source.step == 5
    job.finish(survivors, restore_snapshot=source)
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_a_survivor_that_is_ahead_returns_to_its_other_buffer_without_reading(make_job: Any, reference: Any) -> None:
    job = make_job(memory=True, **SPEC)
    *workers, spare = job.workers(3)
    workers[1].strike("optimizer", 5, "stop")
    workers[0].strike("forward", 6, "hold")
    generation = job.start(workers)
    for worker in workers:
        worker.reached()
    workers[1].kill()
    assert workers[1].died()
    workers[0].call("interrupt", generation)
    workers[0].call("go")
    group = [workers[0], spare]
    source = job.in_memory([workers[0].exit()], group)
    job.finish(group, restore_snapshot=source)
    (formed,) = [item for item in job.reported(group, GroupFormed) if item.generation == job.generation]
    assert formed.start_step == 5
    assert job.losses(group) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_the_state_of_a_tasks_own_optimizer_is_not_moved(make_job: Any, reference: Any, tmp_path: Path) -> None:
    spec = {**SPEC, "task": "tiny_tasks:Augmenting"}
    job = make_job(memory=True, **spec)
    workers = job.workers(2)
    workers[0].strike("forward", 4, "hold")
    generation = job.start(workers)
    workers[0].reached()
    assert list(tmp_path.rglob("own-[0-9]*")) and not list(tmp_path.rglob("own-live-*"))
    workers[0].call("interrupt", generation)
    workers[0].call("go")
    exits = job.interrupt(workers[1:])
    source = job.in_memory([workers[0].exit(), *exits], workers)
    job.finish(workers, restore_snapshot=source)
    assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), abs=1e-5)
