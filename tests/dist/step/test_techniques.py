"""Settings that change how a step is computed, not what is learnt: precision, reductions, compilation, offloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.layout import Layout, fully_sharded
from shoal_workers.contract.worker_reports import StepSkipped

_STEPS = 6
SPEC: dict[str, Any] = {
    "model": {"dropout": 0.0},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.01, "clip_norm": 1.0},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "snapshot": {"enabled": False},
    "seed": 3,
}


def _train(make_job: Any, name: str = "job", layout: Layout | None = None, **changes: Any) -> tuple[Any, Any]:
    job = make_job(name, **{**SPEC, **changes})
    layout = layout or fully_sharded(2)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    return job, workers


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp16_with_its_loss_scale_learns_what_fp32_learns(make_job: Any, reference: Any, world_size: int) -> None:
    job, workers = _train(make_job, layout=fully_sharded(world_size), precision="fp16")
    losses = job.losses(workers)
    assert losses == pytest.approx(reference(_STEPS, **SPEC), abs=2e-2)
    assert losses != reference(_STEPS, **SPEC)


@pytest.mark.parametrize("reduction", ["bf16", "fp16"])
def test_reductions_in_a_smaller_dtype_only_round(make_job: Any, reference: Any, reduction: str) -> None:
    job, workers = _train(make_job, reduce_precision=reduction)
    losses = job.losses(workers)
    assert losses == pytest.approx(reference(_STEPS, **SPEC), abs=2e-2)
    assert losses != pytest.approx(reference(_STEPS, **SPEC), abs=1e-7)


def test_offloaded_state_gives_the_same_losses(make_job: Any, reference: Any) -> None:
    layout = fully_sharded(2).model_copy(update={"offload": True})
    job, workers = _train(make_job, layout=layout)
    assert job.losses(workers) == pytest.approx(reference(_STEPS, **SPEC), abs=1e-5)


def test_the_fused_update_gives_the_same_losses(make_job: Any, reference: Any) -> None:
    job, workers = _train(make_job, optimizer={**SPEC["optimizer"], "fused": True})
    assert job.losses(workers) == pytest.approx(reference(_STEPS, **SPEC), abs=1e-5)


@pytest.mark.matrix  # the compiler takes half a minute on a cold start
def test_compiled_blocks_give_the_same_losses(make_job: Any, reference: Any) -> None:
    job, workers = _train(make_job, compile=True, plan={"blocks": "blocks", "num_blocks": 2})
    assert job.losses(workers) == pytest.approx(reference(_STEPS, **SPEC), abs=1e-5)


STEEP = {**SPEC, "task": "tiny_tasks:Steep", "model": {"dropout": 0.0, "on": 5}, "precision": "fp16"}
"""Sample 5 makes gradients that leave the range of fp16 unless the scale is far below its first value."""


def test_an_overflow_costs_its_step_and_halves_the_scale(make_job: Any) -> None:
    job, workers = _train(make_job, **STEEP)
    skipped = job.reported(workers, StepSkipped)
    assert skipped
    assert set(job.losses(workers)) == set(range(1, _STEPS + 1)) - {one.step for one in skipped}


def test_a_recovery_continues_with_the_loss_scale_of_the_lost_group(make_job: Any, tmp_path: Path) -> None:
    undisturbed, workers = _train(make_job, "whole", **STEEP)
    skipped = {one.step for one in undisturbed.reported(workers, StepSkipped)}
    losses = undisturbed.losses(workers)

    job = make_job("halved", **{**STEEP, "checkpoint": {"every_steps": 1}})
    workers = job.workers(2)
    job.start(workers)
    job.wait_until_committed(workers, max(skipped) if max(skipped) < _STEPS else min(skipped))
    job.interrupt(workers)
    job.commit(workers)
    job.finish(workers)
    assert {one.step for one in job.reported(workers, StepSkipped)} == skipped
    assert job.losses(workers) == pytest.approx(losses, abs=1e-6)
