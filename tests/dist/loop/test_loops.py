"""Loops of a user's own: killed, grown and shrunk, their losses are those of the undisturbed run in one process."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_loop
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed

ROOT = Path(__file__).parents[3]
LOOPS = ROOT / "tests" / "kit" / "loops"
STEPS = 8


def file_of(name: str) -> Path:
    return ROOT / "examples" / "gallery" / "gan" / "train.py" if name == "gan" else LOOPS / f"{name}.py"


def spec_of(name: str = "digits") -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": str(file_of(name).relative_to(ROOT)), "args": [str(STEPS)]},
        "elasticity": {"max_workers": plain_loop.MOST_WORKERS},
        "snapshot": {"budget": 1.0},
    }


@functools.cache
def undisturbed(name: str = "digits") -> dict[int, float]:
    """The losses in plain torch, by step."""
    program = [sys.executable, plain_loop.__file__, str(file_of(name)), str(STEPS)]
    answer = subprocess.run(program, capture_output=True, text=True, check=True)
    return {int(step): loss for step, loss in json.loads(answer.stdout).items()}


@pytest.mark.parametrize(("name", "world_size"), [("digits", 1), ("digits", 3), ("gan", 3), ("contrastive", 2)])
def test_a_loop_trains_at_any_size_as_plain_torch_does(make_job: Any, name: str, world_size: int) -> None:
    job = make_job(memory=True, **spec_of(name))
    workers = job.workers(world_size)
    ends = job.run(workers, layout=replicated(world_size))
    assert [(e.kind, e.step, e.is_durable) for e in ends] == [(ExitKind.FINISHED, STEPS, True)] * world_size, ends
    assert job.losses(workers) == pytest.approx(undisturbed(name), abs=3e-7)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        *(("digits", phase) for phase in ("forward", "backward", "optimizer", "snapshot")),
        ("gan", "optimizer"),
        ("contrastive", "backward"),
    ],
)
def test_a_killed_rank_costs_at_most_one_step_and_changes_no_loss(make_job: Any, name: str, phase: str) -> None:
    job = make_job(memory=True, **spec_of(name))
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    victim.strike(phase, 5, "kill")
    job.start(workers, layout=replicated(3))
    assert victim.died()
    exits = job.interrupt(survivors)
    assert {e.kind for e in exits} <= {ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED}
    source = job.in_memory(exits, survivors)
    assert source.step >= 4
    ends = job.run(survivors, layout=replicated(2), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.reported(survivors, GroupFormed)[-1].start_step == source.step
    assert job.losses(survivors) == pytest.approx(undisturbed(name), abs=3e-7)


@pytest.mark.parametrize(("phase", "name"), [("backward", "digits"), ("forward", "gan")])
def test_no_completed_step_is_repeated_although_copies_are_rare(make_job: Any, phase: str, name: str) -> None:
    """A survivor keeps the state that it has when it leaves the broken group."""
    job = make_job(memory=True, **spec_of(name) | {"snapshot": {"budget": 1e-6}})
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    victim.strike(phase, 7, "kill")
    job.start(workers, layout=replicated(3))
    assert victim.died()
    source = job.in_memory(job.interrupt(survivors), survivors)
    assert source.step == 7
    ends = job.run(survivors, layout=replicated(2), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.losses(survivors) == pytest.approx(undisturbed(name), abs=3e-7)


def test_a_loop_that_yields_goes_on_with_more_workers_without_losing_a_step(make_job: Any) -> None:
    job = make_job(memory=True, **spec_of())
    workers = job.workers(2)
    workers[0].strike("forward", 4, "hold")
    generation = job.start(workers, layout=replicated(2))
    workers[0].reached()
    workers[1].call("request_yield", generation, False)
    workers[0].call("go")
    exits = [worker.exit() for worker in workers]
    assert [(e.kind, e.step, e.is_durable) for e in exits] == [(ExitKind.YIELDED, 5, False)] * 2, exits
    larger = workers + job.workers(1)
    ends = job.run(larger, layout=replicated(3), restore_snapshot=job.in_memory(exits, larger))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 3, ends
    assert job.reported(larger, GroupFormed)[-1].start_step == 5
    assert job.losses(larger) == pytest.approx(undisturbed(), abs=3e-7)


def test_a_loop_goes_on_from_a_checkpoint(make_job: Any) -> None:
    job = make_job(**spec_of(), checkpoint={"every_steps": 3})
    workers = job.workers(2)
    workers[1].strike("forward", 7, "hold")
    job.start(workers, layout=replicated(2))
    workers[1].reached()
    job.wait_until_committed(workers, 6)
    workers[1].kill()
    job.interrupt(workers[:1])
    ends = job.run(workers[:1], layout=replicated(1))
    assert [e.kind for e in ends] == [ExitKind.FINISHED], ends
    assert job.reported(workers[:1], GroupFormed)[-1].start_step == 6
    assert job.losses(workers[:1]) == pytest.approx(undisturbed(), abs=3e-7)


def test_an_error_of_the_loop_names_its_line(make_job: Any) -> None:
    job = make_job(**spec_of("mistaken"))
    [end] = job.run(job.workers(1), layout=replicated(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert end.error.type == "ZeroDivisionError" and end.error.line == "mistaken.py:12 in train()"


def test_a_file_that_gives_nothing_to_shoal_run_is_one_sentence(make_job: Any) -> None:
    job = make_job(**spec_of("no_loop"))
    [end] = job.run(job.workers(1), layout=replicated(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert end.error.message.startswith("tests/kit/loops/no_loop.py has ended without shoal.run(train).")


@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")])
def test_without_a_service_the_loop_trains_in_its_own_process_and_goes_on_from_its_checkpoint(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    environment = {**os.environ, "SHOAL_CHECKPOINT_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    losses: dict[int, float] = {}
    for steps in (5, STEPS):
        program = [sys.executable, *launcher, str(LOOPS / "digits.py"), str(steps)]
        answer = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
        assert answer.returncode == 0, answer.stderr
        lines = re.findall(r"^step (\d+)  loss ([0-9.]+)", answer.stdout, re.MULTILINE)
        losses |= {int(step): float(loss) for step, loss in lines}
        assert f'"steps": {steps}' in answer.stdout and '"end": "finished"' in answer.stdout
    assert len(lines) == STEPS - 5, "the second run went on from the first one's checkpoint"
    assert losses == pytest.approx(undisturbed(), abs=2e-6)  # printed with six digits
