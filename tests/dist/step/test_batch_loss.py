"""A loss of the whole global batch: the gradient is that of one process that holds all samples, at every size."""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds import plain_reference
from shoal_workers.contract.layout import Layout, ShardLevel
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport

STEPS = 5
SPEC: dict[str, Any] = {
    "task": "contrastive_tasks:Clip",
    "batch": {"global_size": 20, "micro_size": 4},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "seed": 7,
}


def _assert_plain(seen: list[StepReport], spec: dict[str, Any], tolerance: float = 1e-5) -> None:
    plain = plain_reference.losses(spec, STEPS)
    assert [one.step for one in seen] == list(range(1, STEPS + 1))
    for one in seen:
        loss, norm, _, metrics = plain[one.step]
        assert (one.loss, one.grad_norm) == pytest.approx((loss, norm), rel=tolerance)
        assert one.metrics == pytest.approx(metrics, rel=tolerance)


def _run(make_job: Any, layout: Layout, spec: dict[str, Any]) -> list[StepReport]:
    job = make_job(f"{layout.describe()}-{layout.shard}", **spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    return list(job.reported(workers, StepReport))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(dp_shard=3, shard=ShardLevel.OPTIMIZER), "Clip"),
        (Layout(dp_shard=1), "Clip"),
        (Layout(dp_shard=3), "Clip"),
        (Layout(dp_shard=2, dp_replicate=2), "Clip"),
        (Layout(dp_shard=2), "Supervised"),
    ],
)
def test_any_layout_of_the_data_trains_as_one_process_that_holds_the_batch(
    make_job: Any, layout: Layout, kind: str
) -> None:
    spec = {**SPEC, "task": f"contrastive_tasks:{kind}"}
    _assert_plain(_run(make_job, layout, spec), spec)


@pytest.mark.slow
def test_deterministic_mode_has_the_same_bits_at_every_size(make_job: Any) -> None:
    spec = {**SPEC, "deterministic": True}
    one, three = (_run(make_job, Layout(dp_shard=number), spec) for number in (1, 3))
    assert [(step.loss, step.grad_norm) for step in one] == [(step.loss, step.grad_norm) for step in three]
    _assert_plain(one, spec)


@pytest.mark.slow
def test_bfloat16_rows_are_compared_in_fp32(make_job: Any) -> None:
    spec = {**SPEC, "data": {"norm": "LayerNorm"}}
    plain = plain_reference.losses(spec, STEPS)
    seen = _run(make_job, Layout(dp_shard=2), {**spec, "precision": "bf16"})
    assert [one.loss for one in seen] == pytest.approx([plain[one.step][0] for one in seen], rel=3e-2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "FewRows",
            "embed() returned [8], [8]. Return a tensor, or a tuple of tensors, each with one row for each",
        ),
        ("Weighs", "batch_loss() returned a weight"),
        ("HalfOfIt", "lacks batch_loss()"),
    ],
)
def test_what_is_no_loss_of_a_batch_is_refused_in_words(make_job: Any, kind: str, words: str) -> None:
    job = make_job(**{**SPEC, "task": f"contrastive_tasks:{kind}"})
    (end,) = job.run(job.workers(1), layout=Layout())
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert words in end.error.message
