"""A model may use other blocks and parameters in each micro-batch: the result is that of a plain loop at any size."""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds import plain_reference
from shoal_workers.contract.layout import Layout, ShardLevel
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport

_STEPS = 6
SPEC: dict[str, Any] = {
    "task": "branching_tasks:Branches",
    "batch": {"global_size": 10, "micro_size": 2},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5, "weight_decay": 0.3},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 5},
    "snapshot": {"enabled": False},
    "seed": 7,
}
KINDS = ("heads", "skipped", "order", "twice", "rare", "never")


def _run(make_job: Any, layout: Layout, **spec: Any) -> dict[int, StepReport]:
    job = make_job(f"{layout.describe()}-{layout.shard}", **spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    return {one.step: one for one in job.reported(workers, StepReport)}


def _assert_plain(seen: dict[int, StepReport], spec: dict[str, Any]) -> None:
    plain = plain_reference.losses(spec, _STEPS)
    assert {step: one.loss for step, one in seen.items()} == pytest.approx(
        {step: values[0] for step, values in plain.items()}, abs=1e-6
    )
    assert {step: one.grad_norm for step, one in seen.items()} == pytest.approx(
        {step: values[1] for step, values in plain.items()}, rel=1e-5
    )


def _is_in_matrix(level: ShardLevel, kind: str) -> bool:
    return level is ShardLevel.GRADIENTS or (level is ShardLevel.FULL and kind in ("order", "twice", "never"))


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        pytest.param(level, kind, marks=[pytest.mark.matrix] if _is_in_matrix(level, kind) else [])
        for level in ShardLevel
        for kind in KINDS
    ],
)
def test_three_ranks_equal_the_plain_loop(make_job: Any, kind: str, level: ShardLevel) -> None:
    spec = {**SPEC, "data": {"kind": kind}}
    _assert_plain(_run(make_job, Layout(dp_shard=3, shard=level), **spec), spec)


@pytest.mark.parametrize("level", [ShardLevel.OPTIMIZER, ShardLevel.FULL])
def test_replicas_equal_the_plain_loop(make_job: Any, level: ShardLevel) -> None:
    spec = {**SPEC, "data": {"kind": "skipped"}}
    _assert_plain(_run(make_job, Layout(dp_replicate=2, dp_shard=2, shard=level), **spec), spec)


@pytest.mark.parametrize("level", [ShardLevel.OPTIMIZER, ShardLevel.FULL])
def test_deterministic_mode_equals_the_plain_loop(make_job: Any, level: ShardLevel) -> None:
    spec = {**SPEC, "data": {"kind": "skipped"}, "deterministic": True}
    _assert_plain(_run(make_job, Layout(dp_shard=2, shard=level), **spec), spec)


def test_bfloat16_takes_a_parameter_that_only_the_last_micro_batch_uses(make_job: Any) -> None:
    """FSDP keeps sums over micro-batches in float32, and a first gradient in bfloat16."""
    spec = {**SPEC, "data": {"kind": "skipped"}, "precision": "bf16"}
    layouts = [Layout(dp_shard=number, shard=ShardLevel.OPTIMIZER) for number in (1, 2)]
    one, two = (_run(make_job, layout, **spec) for layout in layouts)
    assert [report.loss for report in two.values()] == pytest.approx([report.loss for report in one.values()], rel=1e-2)


@pytest.mark.parametrize("layout", [Layout(dp_shard=1), Layout(dp_shard=2)], ids=Layout.describe)
def test_gradient_hooks_of_parameters_run_for_each_micro_batch(make_job: Any, layout: Layout) -> None:
    spec = {**SPEC, "task": "branching_tasks:Hooked", "data": {"kind": "hooked"}}
    _assert_plain(_run(make_job, layout, **spec), spec)


@pytest.mark.parametrize(
    ("task", "kind", "words"),
    [
        ("Hooked", "accumulated", "heads.0.bias has a hook of register_post_accumulate_grad_hook"),
        ("Writes", "clamp", "writes to the parameter blocks.1.inner.weight"),
        ("Writes", "max_norm", "with max_norm=0.5: each forward pass would change the parameter in place"),
    ],
)
def test_what_depends_on_the_samples_of_one_rank_is_refused(make_job: Any, task: str, kind: str, words: str) -> None:
    job = make_job("job", **{**SPEC, "task": f"branching_tasks:{task}", "data": {"kind": kind}})
    (end,) = job.run(job.workers(1), layout=Layout())
    assert end.kind is ExitKind.USER_ERROR
    assert end.error is not None
    assert words in end.error.message


@pytest.mark.slow
def test_communication_that_overlaps_with_the_passes_has_the_same_order(answer_of: Any) -> None:
    differences = answer_of("streamed_order.py")
    assert len(differences) == 18
    assert max(differences.values()) < 1e-5, differences
