"""`run.epochs` keeps a program's epochs: the same bits at one worker; it goes on within an epoch and at its border."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.processes.warm import warm_python
from shoal_workers.checkpoint.reader import load, read_catalogue
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed

FILE = "tests/kit/loops/epochs.py"
ROOT = Path(__file__).parents[3]
STEPS, STEPS_OF_AN_EPOCH = 12, 3


@functools.cache
def plain(kind: str) -> dict[str, Any]:
    command = [warm_python(), str(ROOT / FILE), kind, "--plain"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def spec_of(kind: str, *arguments: str, max_workers: int = 2) -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": FILE, "args": [kind, *arguments]},
        "elasticity": {"max_workers": max_workers},
        "snapshot": {"budget": 1.0},
    }


def model_in(directory: str) -> dict[str, list[float]]:
    catalogue, _ = read_catalogue(directory)
    names = [name for name in catalogue if name.startswith("model/")]
    state = {name: torch.empty(catalogue[name].shape, dtype=catalogue[name].dtype) for name in names}
    load(state, directory=directory)
    return {name.removeprefix("model/"): value.flatten().tolist() for name, value in state.items()}


def losses_of(kind: str) -> dict[int, float]:
    return dict(enumerate(plain(kind)["losses"], 1))


@pytest.mark.parametrize("kind", ["normed", "early"])
def test_a_program_has_the_same_bits_at_one_worker_as_without_shoal(make_job: Any, kind: str) -> None:
    """The last batch of an epoch is smaller. The checkpoint is that after the last epoch's schedule."""
    job = make_job(**spec_of(kind, max_workers=1))
    [end] = job.run(workers := job.workers(1), layout=replicated(1))
    assert end.kind is ExitKind.FINISHED, end
    assert job.losses(workers) == losses_of(kind)
    assert len(losses_of(kind)) == (STEPS if kind == "normed" else 9)
    assert model_in(job.committed[-1]) == plain(kind)["model"]


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
@pytest.mark.parametrize("step", [4, 5, 6], ids=["within", "last", "first"])
def test_a_killed_rank_costs_at_most_one_step_within_an_epoch_and_at_its_border(
    make_job: Any, phase: str, step: int
) -> None:
    job = make_job(memory=True, **spec_of("usual"))
    survivor, victim = workers = job.workers(2)
    victim.strike(phase, step, "kill")
    job.start(workers, layout=replicated(2))
    assert victim.died()
    source = job.in_memory(job.interrupt([survivor]), [survivor])
    assert source.step >= step - 1
    [end] = job.run([survivor], layout=replicated(1), restore_snapshot=source)
    assert end.kind is ExitKind.FINISHED, end
    check(job, [survivor])


def check(job: Any, workers: list[Any]) -> None:
    """Losses, and what was logged after each epoch: once, with its last step."""
    assert job.losses(workers) == pytest.approx(losses_of("usual"), abs=3e-7)
    assert model_in(job.committed[-1]) == {
        name: pytest.approx(values, abs=2e-6) for name, values in plain("usual")["model"].items()
    }
    logged = {r.step: r.metrics["epoch"] for r in job.reports(workers[0]) if "epoch" in r.metrics}
    assert logged == {step: step // 3 - 1 for step in range(3, STEPS + 1, 3) if step >= min(logged)}


@pytest.mark.parametrize("step", [4, 5])
def test_a_loop_that_grows_within_an_epoch_or_at_its_border_goes_on_in_it(make_job: Any, step: int) -> None:
    job = make_job(memory=True, **spec_of("usual"))
    [first] = job.workers(1)
    first.strike("forward", step, "hold")
    generation = job.start([first], layout=replicated(1))
    first.reached()
    first.call("request_yield", generation, False)
    first.call("go")
    ended = first.exit()
    assert (ended.kind, ended.step) == (ExitKind.YIELDED, step + 1), ended
    larger = [first, *job.workers(1)]
    ends = job.run(larger, layout=replicated(2), restore_snapshot=job.in_memory([ended], larger))
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.reported(larger, GroupFormed)[-1].start_step == step + 1
    check(job, larger)


def test_a_checkpoint_of_an_epochs_last_step_has_what_followed_it(make_job: Any) -> None:
    job = make_job(**spec_of("usual"), checkpoint={"every_steps": 3})
    workers = job.workers(2)
    workers[1].strike("forward", 7, "hold")
    job.start(workers, layout=replicated(2))
    workers[1].reached()
    job.wait_until_committed(workers, 6)
    workers[1].kill()
    job.interrupt(workers[:1])
    [end] = job.run(workers[:1], layout=replicated(1))
    assert end.kind is ExitKind.FINISHED, end
    assert job.reported(workers[:1], GroupFormed)[-1].start_step == 6
    check(job, workers[:1])


def test_a_change_before_the_batches_of_an_epoch_is_refused_when_it_would_be_repeated(make_job: Any) -> None:
    job = make_job(memory=True, **spec_of("scheduled_first"))
    survivor, victim = workers = job.workers(2)
    victim.strike("backward", 4, "kill")
    job.start(workers, layout=replicated(2))
    assert victim.died()
    source = job.in_memory(job.interrupt([survivor]), [survivor])
    [end] = job.run([survivor], layout=replicated(1), restore_snapshot=source)
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert "what is tracked has changed at the beginning of epoch 1, of which 1 steps are complete" in end.error.message
