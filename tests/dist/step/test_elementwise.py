"""Which optimizers run on local shards, and whose state is moved: those of a table, what a task promises, and all that
keep nothing beside their state where parameters are whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, NAdam, Optimizer

from shoal_workers.contract.layout import Layout, fully_sharded, plain
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SnapshotCost
from shoal_workers.engine.step.elementwise import why_as_built

sys.path.append(str(Path(__file__).parents[2] / "kit" / "tasks"))
import own_optimizers as own

STEPS = 8
SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 100},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "snapshot": {"budget": 1e-6},
    "seed": 3,
}


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((6, 6), (17, 3))]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_step_that_something_is_hooked_into_stays_as_it_was_built(is_split: bool) -> None:
    optimizer = SGD(_parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    assert "hooked" in why_as_built(optimizer, is_split=is_split)


@pytest.mark.parametrize("kind", [SGD, AdamW, Adagrad, NAdam])
def test_elementwise_optimizers_of_torch_are_known(kind: type[Optimizer]) -> None:
    assert why_as_built(kind(_parameters(), lr=0.1), is_split=True) == ""  # type: ignore[call-arg]


def test_optimizers_of_torch_that_are_not_elementwise_are_known() -> None:
    for optimizer in (Adafactor(_parameters()), Muon(_parameters())):
        assert "is not elementwise" in why_as_built(optimizer, is_split=False)


def test_any_other_class_may_run_on_whole_parameters_only() -> None:
    optimizer = own.Lion(_parameters())
    assert why_as_built(optimizer, is_split=False) == ""
    assert "elementwise_optimizer = True" in why_as_built(optimizer, is_split=True)


def _killed(make_job: Any, layout: Layout, **spec: Any) -> tuple[int, SnapshotCost, dict[int, float]]:
    """The step to which the group goes back if a worker dies after six steps, and the first report of snapshots."""
    job = make_job(memory=True, **{**SPEC, **spec})
    survivor, source = job.lose_one_of_two("forward", 6, layout=layout)
    assert [end.kind for end in job.run([survivor], restore_snapshot=source)] == [ExitKind.FINISHED]
    return source.step, job.reported([survivor], SnapshotCost)[0], job.losses([survivor])


@pytest.mark.parametrize(
    ("layout", "task", "optimizer"),
    [
        (fully_sharded(2), "own_optimizers:Promised", "Lion"),
        (fully_sharded(2), "own_optimizers:Keeping", ""),
        (plain(2), "own_optimizers:Own", "Lion"),
        (plain(2), "own_optimizers:Own", "Clipped"),
        pytest.param(fully_sharded(2), "own_optimizers:TensorRate", "", marks=pytest.mark.matrix),
    ],
    ids=["promised", "kept by the task", "whole", "not elementwise, whole", "tensor as rate"],
)
def test_a_death_repeats_no_completed_step_if_the_state_may_be_moved(
    make_job: Any, reference: Any, layout: Layout, task: str, optimizer: str
) -> None:
    spec = {"task": task, "model": {"optimizer": optimizer}}
    step, cost, losses = _killed(make_job, layout, **spec)
    assert (step, cost.copies_reason) == (6, "")
    plain_losses = reference(STEPS, **{**SPEC, **spec})
    assert losses == pytest.approx({step: plain_losses[step] for step in losses}, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "task", "optimizer", "reason"),
    [
        (fully_sharded(2), "Denied", "Clipped", "elementwise_optimizer = False"),
        (fully_sharded(2), "Own", "Lion", "set elementwise_optimizer = True"),
        (plain(2), "Own", "Anchored", "keeps tensors beside its state"),
    ],
)
def test_with_another_one_the_report_says_why_snapshots_are_copies(
    make_job: Any, layout: Layout, task: str, optimizer: str, reason: str
) -> None:
    spec = {"task": f"own_optimizers:{task}", "model": {"optimizer": optimizer}, "snapshot": {"budget": 0.5}}
    _, cost, _ = _killed(make_job, layout, **spec)
    assert reason in cost.copies_reason


@pytest.mark.cells(3, 4)
@pytest.mark.parametrize("revived", [True, False])
@pytest.mark.parametrize("optimizer", ["Counted", "Assigning"])
def test_what_an_optimizer_keeps_elsewhere_goes_on_after_a_restore(
    make_job: Any, reference: Any, optimizer: str, revived: bool
) -> None:
    """A counter that divides the rate, and memory of its own: the step that makes the state of a new optimizer would
    have changed them."""
    spec = {**SPEC, "task": "own_optimizers:Own", "model": {"optimizer": optimizer}, "checkpoint": {"every_steps": 3}}
    job = make_job(memory=optimizer == "Assigning", **spec)
    (worker,) = job.workers(1)
    worker.strike("forward", 5, "hold")
    layout = plain(1) if optimizer == "Assigning" else fully_sharded(1)
    generation = job.start([worker], layout=layout)
    worker.reached()
    job.wait_until_committed([worker], 3)
    worker.call("interrupt", generation)
    worker.call("go")
    worker.exit()
    (other,) = [worker] if revived else job.workers(1)
    (end,) = job.run([other], layout=layout)
    assert end.kind is ExitKind.FINISHED, end
    assert job.losses([worker, other]) == pytest.approx(reference(STEPS, **spec), rel=1e-6)


@pytest.mark.cells(4, 6)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", ["Assigning", "HeavyBall", "History"])
def test_an_optimizer_may_give_parameters_and_state_new_memory(
    make_job: Any, reference: Any, optimizer: str, world_size: int
) -> None:
    spec = {**SPEC, "task": "own_optimizers:Own", "model": {"optimizer": optimizer}}
    job = make_job(memory=True, **spec)
    workers = job.workers(world_size)
    job.finish(workers, layout=plain(world_size))
    assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


def test_a_tensor_of_an_optimizer_that_its_step_changes_is_refused(make_job: Any) -> None:
    job = make_job(**SPEC, task="own_optimizers:Own", model={"optimizer": "Remembering"})
    (end,) = job.run(job.workers(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert "changes 'norm', which no checkpoint holds" in end.error.message
