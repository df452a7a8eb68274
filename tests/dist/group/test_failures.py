"""A rank dies at an exact phase and step; the survivors leave, re-form, and end with the losses of the plain run."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from kit.processes.fleet import PATIENCE_S
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed, SaveFailed

STEPS = 8
SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 3},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "seed": 3,
}
LEFT = (ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED)


@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_survivors_of_a_killed_rank_re_form_and_end_with_the_plain_losses(
    make_job: Any, reference: Any, phase: str
) -> None:
    job = make_job(**SPEC)
    workers = job.workers(4)
    victim, survivors = workers[1], [workers[0], *workers[2:]]
    workers[0].strike("forward", 4, "hold")
    job.start(workers)
    workers[0].reached()
    job.wait_until_committed(workers, 3)
    victim.strike(phase, 5, "kill")
    workers[0].call("go")
    assert victim.died()
    exits = job.interrupt(survivors)
    assert {e.kind for e in exits} <= set(LEFT)
    assert {e.step for e in exits} <= ({5, 6} if phase == "optimizer" else {5})
    job.finish(survivors)
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)
    assert job.reported(survivors, GroupFormed)[-1].start_step == 3


def test_a_yield_stops_all_ranks_after_the_same_step_and_another_world_size_continues(
    make_job: Any, reference: Any
) -> None:
    job = make_job(**SPEC)
    workers = job.workers(2)
    workers[0].strike("forward", 4, "hold")
    generation = job.start(workers)
    workers[0].reached()
    workers[1].call("request_yield", generation)
    workers[0].call("go")
    exits = [worker.exit() for worker in workers]
    assert [(e.kind, e.step) for e in exits] == [(ExitKind.YIELDED, 5)] * 2
    job.commit(workers)
    larger = workers + job.workers(2)
    job.finish(larger)
    assert job.reported(larger, GroupFormed)[-1].start_step == 5
    assert job.losses(larger) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_a_worker_that_misses_the_rendezvous_does_not_block_the_others(make_job: Any) -> None:
    job = make_job(**SPEC)
    workers = job.workers(2)
    for worker in workers:  # both have begun: one that has not would leave as stale
        worker.strike("forming", 0, "hold")
    job.start(workers, world_size=3)
    for worker in workers:
        worker.reached()
        worker.call("go")
    exits = job.interrupt(workers)
    assert [e.kind for e in exits] == [ExitKind.INTERRUPTED] * 2
    job.finish(workers)


def test_a_missing_rank_is_named_after_the_timeout(make_job: Any) -> None:
    job = make_job(**SPEC)
    workers = job.workers(2)
    assert [worker.call("prepare") for worker in workers] == [None, None]
    exits = job.run(workers, world_size=3, store_timeout_s=4.0)
    assert [e.kind for e in exits] == [ExitKind.FORM_FAILED] * 2
    assert re.search(r": rank (1, )?2\.$", exits[0].error.message)  # rank 1 may be late on a busy machine


def test_a_rank_may_take_longer_to_build_than_to_arrive(make_job: Any) -> None:
    """`store_timeout_s` is the limit of the rendezvous, not of building a model and reading its state."""
    job = make_job(**SPEC)
    workers = job.workers(2)
    assert [worker.call("prepare") for worker in workers] == [None, None]
    workers[1].strike("building", 0, "hold")
    job.start(workers, store_timeout_s=4.0)
    workers[1].reached()
    assert not workers[0].has_exit.wait(5.0), "it waits for rank 1"
    workers[1].call("go")
    assert [worker.exit().kind for worker in workers] == [ExitKind.FINISHED] * 2


def test_a_dead_store_fails_the_rendezvous(make_job: Any) -> None:
    job = make_job(**SPEC)
    gone, survivor = job.workers(2)
    gone.kill()
    (end,) = job.run([survivor], store_port=gone.store_port, store_timeout_s=0.5)
    assert end.kind is ExitKind.FORM_FAILED
    assert str(gone.store_port) in end.error.message


def test_a_fenced_generation_does_not_begin(make_job: Any) -> None:
    job = make_job(**SPEC)
    workers = job.workers(1)
    assert workers[0].call("interrupt", 1) is False
    assert job.run(workers)[0].kind is ExitKind.STALE
    assert job.run(workers)[0].kind is ExitKind.FINISHED


@pytest.mark.parametrize(
    ("model", "phase", "error"),
    [
        ({"fail": "prepare"}, "preparing", "FileNotFoundError"),
        ({"fail": "build"}, "building", "ValueError"),
        ({"fail": "loss", "on": 17}, "forward", "ZeroDivisionError"),
    ],
)
def test_a_user_error_has_the_traceback_of_the_users_own_code(
    make_job: Any, model: dict[str, Any], phase: str, error: str
) -> None:
    job = make_job(task="tiny_tasks:Failing", **{**SPEC, "model": model})
    workers = job.workers(1)
    (end,) = job.run(workers)
    assert end.kind is ExitKind.USER_ERROR
    assert (end.error.type, end.error.phase) == (error, phase)
    assert "tiny_tasks.py" in end.error.traceback
    assert f"engine{os.sep}" not in end.error.traceback.split("tiny_tasks.py")[0]


def test_after_one_ranks_user_error_the_others_wait_until_they_are_interrupted(make_job: Any) -> None:
    job = make_job(task="tiny_tasks:Failing", **{**SPEC, "model": {"fail": "loss", "on": 17}})
    workers = job.workers(4)
    job.start(workers)
    job.wait_for_an_exit()
    exits = job.interrupt(workers)
    kinds = [e.kind for e in exits]
    assert kinds.count(ExitKind.USER_ERROR) == 1
    assert set(kinds) <= {ExitKind.USER_ERROR, *LEFT}


def test_a_loss_that_is_not_finite_ends_every_rank_before_anything_is_updated(make_job: Any) -> None:
    job = make_job(task="tiny_tasks:Failing", **{**SPEC, "model": {"fail": "nan", "on": 17}})
    workers = job.workers(3)
    exits = job.run(workers)
    assert [e.kind for e in exits] == [ExitKind.NON_FINITE] * 3
    assert len({e.step for e in exits}) == 1
    assert "nan" in exits[0].error.message


def test_a_failed_periodic_save_does_not_stop_training(make_job: Any, reference: Any) -> None:
    job = make_job(**SPEC)
    blocked = Path(job.root) / "step-000000000003-a1-g1"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a directory should be")
    workers = job.workers(2)
    job.finish(workers)
    assert {f.step for f in job.reported(workers, SaveFailed)} == {3}
    assert job.losses(workers) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_a_failed_final_save_is_not_a_finished_run(make_job: Any) -> None:
    job = make_job(**SPEC)
    blocked = Path(job.root) / f"step-{STEPS:012d}-a1-g1"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a directory should be")
    workers = job.workers(2)
    exits = job.run(workers)
    assert [e.kind for e in exits] == [ExitKind.STORAGE_FAILED] * 2
    assert exits[0].step == STEPS


def test_a_damaged_checkpoint_is_refused_and_named(make_job: Any) -> None:
    job = make_job(**SPEC)
    workers = job.workers(1)
    job.run(workers)
    newest = Path(job.committed[-1])
    payload = bytearray((newest / "shard-00000.bin").read_bytes())
    payload[len(payload) // 2] ^= 1
    (newest / "shard-00000.bin").write_bytes(payload)
    (end,) = job.run(workers, restore_from=str(newest))
    assert end.kind is ExitKind.DAMAGED_CHECKPOINT
    assert "shard-00000.bin" in end.error.message
    (end,) = job.run(workers, restore_from=str(newest.parent / "step-000000000099-a1-g1"))
    assert end.kind is ExitKind.STORAGE_FAILED and "is not there on" in end.error.message, "its mount is missing"
    older = job.committed[-2]
    (end,) = job.run(workers, restore_from=older)
    assert (end.kind, end.step) == (ExitKind.FINISHED, STEPS)


def test_an_unresponsive_worker_logs_its_stack(make_job: Any) -> None:
    job = make_job(**SPEC)
    workers = job.workers(2)
    workers[0].strike("forward", 4, "hold")
    generation = job.start(workers)
    workers[0].reached()
    for worker in reversed(workers):  # rank 1 first: it waits for rank 0, whose interrupt would fail its collective
        worker.call("interrupt", generation)
    lines: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while not any("on_phase" in line for line in lines):
        assert time.monotonic() < deadline, lines
        lines += [line.text for line in workers[0].new_logs()]
    assert "cannot be woken out of generation 1; open connections of the group: " in lines[0]
    workers[0].call("go")
    assert [worker.exit().kind for worker in workers] == [ExitKind.INTERRUPTED] * 2
