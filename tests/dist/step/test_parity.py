"""Any world size gives the losses of the plain run, with the same batches, randomness, clipping and schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.tasks import biased_tasks
from kit.worlds import plain_reference
from shoal_workers.contract.layout import Layout, ShardLevel
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed, StepReport, ValidationReport

STEPS = 12
SPEC: dict[str, Any] = {
    "batch": {"global_size": 16, "micro_size": 2},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 3},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "seed": 7,
}


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.matrix), 3, 4])
def test_every_world_size_gives_the_losses_of_the_plain_run(make_job: Any, reference: Any, world_size: int) -> None:
    job = make_job(**SPEC)
    workers = job.workers(world_size)
    job.finish(workers)
    assert job.losses(workers) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_gradient_norm_and_learning_rate_are_those_of_torch(make_job: Any) -> None:
    plain = plain_reference.losses(SPEC, STEPS)
    job = make_job(**SPEC)
    workers = job.workers(3)
    job.run(workers)
    reports = job.reported(workers, StepReport)
    assert [r.grad_norm for r in reports] == pytest.approx([plain[r.step][1] for r in reports], rel=1e-4)
    assert [r.lr for r in reports] == pytest.approx([plain[r.step][2] for r in reports], rel=1e-9)
    assert max(r.grad_norm for r in reports) > 0.5, "clipping was never at work"


@pytest.mark.parametrize("layout", [Layout(dp_shard=2, tp=2), Layout(tp=4)], ids=Layout.describe)
def test_a_bias_that_shards_and_tp_both_split_counts_once_in_the_norm(make_job: Any, layout: Layout) -> None:
    spec = {
        **SPEC,
        "task": "biased_tasks:Biased",
        "plan": biased_tasks.PLAN,
        "batch": {"global_size": 4, "micro_size": 1},
    }
    found = []
    for root, degrees in (("one", Layout()), ("split", layout)):
        job = make_job(root, **spec)
        workers = job.workers(degrees.world_size)
        job.finish(workers, layout=degrees)
        found.append([(report.loss, report.grad_norm) for report in job.reported(workers, StepReport)])
    one, split = found
    assert split == [pytest.approx(expected, rel=1e-5) for expected in one]


def test_five_micro_batches_over_four_ranks_are_each_trained_once(make_job: Any, reference: Any) -> None:
    spec = {**SPEC, "batch": {"global_size": 15, "micro_size": 3}}
    job = make_job(**spec)
    workers = job.workers(4)
    job.run(workers)
    assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


def test_randomness_in_the_data_and_a_task_s_own_optimizer_do_not_depend_on_the_world(
    make_job: Any, reference: Any
) -> None:
    spec = {**SPEC, "task": "tiny_tasks:Augmenting", "optimizer": {"lr": 0.3}}
    job = make_job(**spec)
    workers = job.workers(3)
    job.run(workers)
    assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


def test_bf16_gives_the_same_within_its_precision(make_job: Any, reference: Any) -> None:
    spec = {**SPEC, "precision": "bf16"}
    job, workers = make_job(**spec), None
    workers = job.workers(2)
    job.run(workers)
    assert job.losses(workers) == pytest.approx(reference(STEPS, **SPEC), rel=torch.finfo(torch.bfloat16).eps / 2)


def test_validation_is_exact_and_the_same_at_every_world_size(make_job: Any) -> None:
    spec = {**SPEC, "stop": {"steps": 3}, "validation": {"every_steps": 2, "samples": 9}, "deterministic": True}
    seen = {}
    for world_size in (1, 4):
        job = make_job(f"world-{world_size}", **spec)
        workers = job.workers(world_size)
        job.run(workers)
        seen[world_size] = job.reported(workers, ValidationReport)
    assert [(r.step, r.samples) for r in seen[1]] == [(r.step, r.samples) for r in seen[4]] == [(2, 9), (3, 9)]
    assert [r.loss for r in seen[1]] == pytest.approx([r.loss for r in seen[4]], abs=1e-6)
    assert seen[1][0].bits_per_byte == pytest.approx(seen[1][0].loss / 0.6931471805599453)


def test_epochs_and_tokens_are_rounded_up_to_steps(make_job: Any) -> None:
    for stop, steps in (({"epochs": 0.7}, 3), ({"tokens": 129}, 2)):  # 35 of 50 samples; 128 tokens a step
        job = make_job(f"until-{steps}", **{**SPEC, "stop": stop})
        workers = job.workers(1)
        (end,) = job.run(workers)
        assert (end.kind, end.step) == (ExitKind.FINISHED, steps)
        assert job.reported(workers, GroupFormed)[0].total_steps == steps


@pytest.mark.parametrize("level", [ShardLevel.OPTIMIZER, ShardLevel.GRADIENTS])
def test_a_validation_and_a_checkpoint_after_the_same_step_leave_all_ranks_alike(
    make_job: Any, level: ShardLevel
) -> None:
    """Parameters that stay whole after the last forward pass of a validation must not do so on some ranks only."""
    both = {"validation": {"every_steps": 2, "samples": 10}, "checkpoint": {"every_steps": 2}}
    job = make_job(memory=True, **{**SPEC, **both})
    workers = job.workers(3)
    layout = Layout(dp_shard=3, shard=level)
    job.finish(workers, layout=layout)
    assert [r.step for r in job.reported(workers, ValidationReport)] == [2, 4, 6, 8, 10, 12]
