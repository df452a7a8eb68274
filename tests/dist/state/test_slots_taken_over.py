"""A change of layout or size makes no new slot in shared memory, and loses no step around its first update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds.snapshot_spec import snapshot_spec
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import ExitKind

STEPS = 9
SPEC = snapshot_spec(STEPS)


def _files(directory: Path) -> set[tuple[str, int]]:
    return {(path.parent.name, path.stat().st_ino) for path in directory.rglob("own-live-*")}


def _yield_at(job: Any, group: list[Any], step: int, **assignment: Any) -> list[Any]:
    """The exits of a generation that stops after this step."""
    group[0].strike("forward", step - 1, "hold")
    generation = job.start(group, **assignment)
    group[0].reached()
    group[0].call("request_yield", generation, False)
    group[0].call("go")
    exits = [worker.exit() for worker in group]
    assert [one.kind for one in exits] == [ExitKind.YIELDED] * len(exits), [one.error for one in exits]
    return exits


def test_the_same_files_serve_every_layout_and_size(make_job: Any, reference: Any, tmp_path: Path) -> None:
    job = make_job(memory=True, **SPEC)
    workers = job.workers(4)
    exits = _yield_at(job, workers, 2)
    files = _files(tmp_path)
    assert len(files) == 8
    step = 2
    for size in (3, 2, 4):
        group = workers[:size]
        source = job.in_memory(exits, group)
        assert source.step == step
        step += 2
        exits = _yield_at(job, group, step, restore_snapshot=source)
        assert _files(tmp_path) == files
        assert not list(tmp_path.rglob("own-[0-9]*"))
    job.finish(workers, restore_snapshot=job.in_memory(exits, workers))
    assert _files(tmp_path) == files
    assert job.losses(workers) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


@pytest.mark.parametrize(
    ("phase", "action"), [("forward", "kill"), ("optimizer", "kill"), ("optimizer", "kill within")]
)
def test_a_death_around_the_first_update_of_a_smaller_group_costs_no_step(
    make_job: Any, reference: Any, phase: str, action: str
) -> None:
    """The survivors' first update overwrites what the group was restored from."""
    job = make_job(memory=True, **SPEC)
    workers = job.workers(4)
    exits = _yield_at(job, workers, 4)
    first, victim = job.in_memory(exits, workers), workers[2]
    victim.strike(phase, 4, action)
    job.start(workers[:3], restore_snapshot=first)
    assert victim.died()
    survivors = workers[:2]
    exits = job.interrupt(survivors)
    second = job.in_memory(exits, survivors)
    assert (second.generation, second.step) == (first.generation + 1, 4)
    job.finish(survivors, restore_snapshot=second)
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_survivors_that_read_nothing_keep_what_the_others_were_restored_from(make_job: Any, reference: Any) -> None:
    """Rank 1's new worker reads its part, rank 0 keeps its own: only the older generation's snapshot is whole until the
    first update is complete."""
    job = make_job(memory=True, **SPEC)
    *workers, spare = job.workers(3)
    exits = _yield_at(job, workers, 4)
    group = [workers[0], spare]
    source = job.in_memory(exits, group)
    spare.strike("optimizer", 4, "kill within")
    job.start(group, restore_snapshot=source)
    assert spare.died()
    exits = job.interrupt([workers[0]])
    again = job.in_memory(exits, [workers[0], workers[1]])
    assert (again.generation, again.step) == (source.generation, 4)
    job.finish(workers, restore_snapshot=again)
    assert job.losses(workers) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_a_group_with_buddies_keeps_a_third_slot_for_the_next_change(
    make_job: Any, reference: Any, tmp_path: Path
) -> None:
    job = make_job(memory=True, **SPEC)
    workers = [*job.workers(2, "a"), *job.workers(2, "b")]

    def buddy_of(rank: int) -> Any:
        return workers[(rank + 2) % 4]

    exits = _yield_at(job, workers, 3, buddy_of=buddy_of)
    assert len(_files(tmp_path)) == 8
    replicas = Layout(dp_replicate=2, dp_shard=2)
    source = job.in_memory(exits, workers)
    exits = _yield_at(job, workers, 6, buddy_of=buddy_of, restore_snapshot=source, layout=replicas)
    files = _files(tmp_path)
    assert len(files) == 12
    source = job.in_memory(exits, workers)
    job.finish(workers, buddy_of=buddy_of, restore_snapshot=source)
    assert _files(tmp_path) == files
    assert job.losses(workers) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)
