"""The double-buffered state in shared memory: a death costs at most one complete step, and no copy is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed

STEPS = 8
SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 100},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "snapshot": {"budget": 1.0},
    "seed": 3,
}


def _assert_nothing_was_copied(directory: Path) -> None:
    assert list(directory.rglob("own-live-*"))
    assert not list(directory.rglob("own-[0-9]*"))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_state_of_a_killed_rank_is_restored_without_a_snapshot_copy(
    make_job: Any, reference: Any, tmp_path: Path, phase: str
) -> None:
    job = make_job(memory=True, **SPEC)
    shards = job.shards(4)
    victim, survivors = shards[1], [shards[0], *shards[2:]]
    victim.strike(phase, 5, "kill")
    job.start(shards)
    assert victim.gone.wait(30)
    _assert_nothing_was_copied(tmp_path)
    exits = job.interrupt(survivors)
    source = job.in_memory(exits, survivors)
    assert source.step == 5
    assert [e.kind for e in job.run(survivors, restore_snapshot=source)] == [ExitKind.FINISHED] * 3
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_the_state_that_survives_two_deaths_in_a_row_is_the_source_both_times(
    make_job: Any, reference: Any, tmp_path: Path
) -> None:
    """The second death comes before the smaller group has completed a step."""
    job = make_job(memory=True, **SPEC)
    shards = job.shards(4)
    shards[3].strike("backward", 5, "kill")
    job.start(shards)
    assert shards[3].gone.wait(30)
    exits = job.interrupt(shards[:3])
    first = job.in_memory(exits, shards[:3])
    shards[2].strike("backward", 5, "kill")
    job.start(shards[:3], restore_snapshot=first)
    assert shards[2].gone.wait(30)
    _assert_nothing_was_copied(tmp_path)
    exits = job.interrupt(shards[:2])
    second = job.in_memory(exits, shards[:2])
    assert (second.generation, second.step) == (first.generation, 5)
    assert [e.kind for e in job.run(shards[:2], restore_snapshot=second)] == [ExitKind.FINISHED] * 2
    assert job.losses(shards[:2]) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_survivors_read_nothing_if_the_layout_does_not_change(make_job: Any, reference: Any, tmp_path: Path) -> None:
    job = make_job(memory=True, **SPEC)
    *shards, spare = job.shards(4)
    shards[1].strike("backward", 4, "kill")
    job.start(shards)
    assert shards[1].gone.wait(30)
    _assert_nothing_was_copied(tmp_path)
    exits = job.interrupt([shards[0], shards[2]])
    members = [shards[0], spare, shards[2]]
    source = job.in_memory(exits, members)
    shards[0].strike("restoring", 0, "dump")
    shards[0].strike("forward", 4, "dump")
    assert [e.kind for e in job.run(members, restore_snapshot=source)] == [ExitKind.FINISHED] * 3
    before, after = shards[0].dumped(), shards[0].dumped()
    for name, (_, _, values) in before.items():
        assert (values == after[name][2]).all(), name
    (formed,) = [told for told in job.told(members, GroupFormed) if told.generation == job.generation]
    whole = sum(values.nbytes for _, _, values in before.values())
    assert formed.start_step == 4
    assert 0 < formed.restored_bytes < 2 * whole, "the spare's part, and what every rank has a copy of"
    assert job.losses(members) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


@pytest.mark.parametrize("action", ["stop", "kill within"])
def test_what_the_others_had_completed_is_done_again_if_one_dies_before_it_has(
    make_job: Any, reference: Any, tmp_path: Path, action: str
) -> None:
    """Between the vote and the end of the update: the survivors are a step ahead, and still have the one before."""
    job = make_job(memory=True, **SPEC)
    shards = job.shards(3)
    victim, survivors = shards[1], [shards[0], shards[2]]
    victim.strike("optimizer", 5, action)
    for shard in survivors:
        shard.strike("forward", 6, "hold")
    generation = job.start(shards)
    for shard in (victim, *survivors) if action == "stop" else survivors:
        shard.reached()
    victim.kill()
    assert victim.gone.wait(30)
    _assert_nothing_was_copied(tmp_path)
    for shard in survivors:
        shard.call("interrupt", generation)
        shard.call("go")
    exits = job.interrupt(survivors)
    held = {(one.rank, one.step) for end in exits for one in end.snapshot_parts}
    assert held >= {(0, 5), (0, 6), (2, 5), (2, 6)}
    assert {step for rank, step in held if rank == 1} == ({4, 5} if action == "stop" else {5})
    source = job.in_memory(exits, survivors)
    assert source.step == 5
    assert [e.kind for e in job.run(survivors, restore_snapshot=source)] == [ExitKind.FINISHED] * 2
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_a_survivor_that_is_ahead_turns_back_without_reading(make_job: Any, reference: Any) -> None:
    job = make_job(memory=True, **SPEC)
    *shards, spare = job.shards(3)
    shards[1].strike("optimizer", 5, "stop")
    shards[0].strike("forward", 6, "hold")
    generation = job.start(shards)
    for shard in shards:
        shard.reached()
    shards[1].kill()
    assert shards[1].gone.wait(30)
    shards[0].call("interrupt", generation)
    shards[0].call("go")
    members = [shards[0], spare]
    source = job.in_memory([shards[0].exit()], members)
    assert [e.kind for e in job.run(members, restore_snapshot=source)] == [ExitKind.FINISHED] * 2
    (formed,) = [told for told in job.told(members, GroupFormed) if told.generation == job.generation]
    assert formed.start_step == 5
    assert job.losses(members) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_a_tasks_own_optimizer_is_left_where_it_is(make_job: Any, reference: Any, tmp_path: Path) -> None:
    spec = {**SPEC, "task": "tiny_tasks:Augmenting"}
    job = make_job(memory=True, **spec)
    shards = job.shards(2)
    shards[0].strike("forward", 4, "hold")
    generation = job.start(shards)
    shards[0].reached()
    assert list(tmp_path.rglob("own-[0-9]*")) and not list(tmp_path.rglob("own-live-*"))
    shards[0].call("interrupt", generation)
    shards[0].call("go")
    exits = job.interrupt(shards[1:])
    source = job.in_memory([shards[0].exit(), *exits], shards)
    assert [e.kind for e in job.run(shards, restore_snapshot=source)] == [ExitKind.FINISHED] * 2
    assert job.losses(shards) == pytest.approx(reference(STEPS, **spec), abs=1e-5)
