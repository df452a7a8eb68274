"""A loss that is a sum with a weight: a mean over tokens that is exact over micro-batches, ranks and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from kit.processes.worker_pool import Plain
from kit.worlds import layout_cases
from shoal_workers.contract.language_model import LanguageModelConfig, plan_of_language_model
from shoal_workers.contract.layout import ContextMethod, Layout, Schedule, ShardLevel, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport, StepSkipped
from shoal_workers.engine.task.returned import Metrics, Share

_STEPS = 4
SPEC: dict[str, Any] = {
    "task": "weighted_tasks:Uneven",
    "batch": {"global_size": 10, "micro_size": 2},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 7},
    "snapshot": {"enabled": False},
    "seed": 7,
}
STAGED: dict[str, Any] = {
    **SPEC,
    "task": "weighted_tasks:StagedUneven",
    "plan": {"blocks": "blocks", "num_blocks": 4, "first": ["embed"], "last": ["head"], "hidden_size": 24},
}
SINGLE: dict[str, Any] = {**SPEC, "batch": {"global_size": 5, "micro_size": 1}, "optimizer": {"lr": 0.02}}
"""Not clipped, and some micro-batches have no token that counts."""
MEMORY: dict[str, Any] = {**SPEC, "stop": {"steps": 8}, "checkpoint": {"every_steps": 3}, "snapshot": {}}


def _text(model: str, text: str) -> dict[str, Any]:
    batch = {"global_size": 6, "micro_size": 2}
    spec = layout_cases.spec_of(model, text, batch=batch, stop={"steps": 3}, task="weighted_text:WeightedText")
    plan = plan_of_language_model(LanguageModelConfig.model_validate(spec["model"]))
    return {**spec, "plan": plan.model_dump(mode="json", exclude_defaults=True)}


def _assert_equal(seen: Plain, plain: Plain, rel: float = 1e-6) -> None:
    assert seen.losses == pytest.approx(plain.losses, rel=rel)
    assert seen.norms == pytest.approx(plain.norms, rel=1e-5)
    assert seen.validation == pytest.approx(plain.validation, rel=rel)
    assert seen.metrics == {step: pytest.approx(metrics, rel=1e-5) for step, metrics in plain.metrics.items()}
    assert {step: one["same"] for step, one in seen.metrics.items()} == pytest.approx(seen.losses, rel=1e-6)


def _named(*layouts: Layout, in_matrix: tuple[Layout, ...] = ()) -> list[Any]:
    every = [*layouts, *in_matrix]
    names = [f"{one.describe()} {one.shard} {one.schedule if one.pp > 1 else one.context}" for one in every]
    marks: list[Any] = [()] * len(layouts) + [pytest.mark.matrix] * len(in_matrix)
    return [pytest.param(one, id=name, marks=mark) for one, name, mark in zip(every, names, marks, strict=True)]


def _exits(job: Any, workers: Any, **changes: Any) -> list[Any]:
    return [one.kind for one in job.run(workers, **changes)]


@pytest.mark.parametrize(
    "layout",
    _named(
        Layout(),
        Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER),
        fully_sharded(3),
        in_matrix=(
            Layout(dp_replicate=3),
            Layout(dp_replicate=2, dp_shard=2),
            Layout(dp_shard=3, shard=ShardLevel.GRADIENTS),
        ),
    ),
)
def test_any_data_layout_equals_the_plain_loop(pool_of: Any, plain_run: Any, layout: Layout) -> None:
    """Five micro-batches: two and three ranks have different numbers of them, and padding."""
    _assert_equal(pool_of(SPEC).train(layout), plain_run(SPEC))


@pytest.mark.parametrize("layout", _named(Layout(dp_shard=2), in_matrix=(Layout(), Layout(dp_replicate=3))))
def test_a_micro_batch_in_which_nothing_counts_adds_nothing(pool_of: Any, plain_run: Any, layout: Layout) -> None:
    _assert_equal(pool_of(SINGLE).train(layout), plain_run(SINGLE))


@pytest.mark.parametrize(
    "layout",
    _named(
        Layout(pp=2, schedule=Schedule.ONE_F_ONE_B),
        in_matrix=(
            Layout(pp=2, dp_shard=2, schedule=Schedule.GPIPE),
            Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1)),
        ),
    ),
)
def test_a_pipeline_of_which_only_the_last_stage_has_the_weights(pool_of: Any, plain_run: Any, layout: Layout) -> None:
    _assert_equal(pool_of(STAGED).train(layout), plain_run(STAGED))


@pytest.mark.parametrize(
    "layout",
    _named(
        Layout(tp=2),
        in_matrix=(
            Layout(cp=2),
            Layout(cp=2, context=ContextMethod.ULYSSES),
            Layout(dp_shard=2, tp=2),
            Layout(pp=2, tp=2, schedule=Schedule.ONE_F_ONE_B),
        ),
    ),
)
def test_ranks_that_share_a_sample_count_it_once(pool_of: Any, plain_run: Any, text: str, layout: Layout) -> None:
    """What is split inside a sample is rounded in another way, as in test_layouts.py."""
    spec = _text("dense", text)
    _assert_equal(pool_of(spec).train(layout), plain_run(spec), rel=1e-5)


@pytest.mark.matrix
def test_experts_on_other_ranks_train_as_in_one_process(pool_of: Any, plain_run: Any, text: str) -> None:
    spec = _text("experts", text)
    _assert_equal(pool_of(spec).train(Layout(dp_shard=2, ep=2)), plain_run(spec), rel=1e-5)


def test_in_deterministic_mode_all_bits_are_equal_at_every_world_size(pool_of: Any, plain_run: Any) -> None:
    spec = {**SINGLE, "deterministic": True}
    one, two = (pool_of(spec).train(fully_sharded(size)) for size in (1, 2))
    assert one == two
    _assert_equal(two, plain_run(SINGLE))


def test_bfloat16_rounds_as_much_as_with_means(pool_of: Any, plain_run: Any) -> None:
    seen = pool_of({**SPEC, "precision": "bf16"}).train(fully_sharded(2))
    assert seen.losses == pytest.approx(plain_run(SPEC).losses, rel=2e-2)
    assert seen.norms == pytest.approx(plain_run(SPEC).norms, rel=1e-1)


def test_fp16_skips_no_step_because_sums_are_larger_than_means(make_job: Any, plain_run: Any) -> None:
    job = make_job(**{**SPEC, "precision": "fp16", "model": {"factor": 30_000}})
    workers = job.workers(2)
    assert _exits(job, workers) == [ExitKind.FINISHED] * 2
    assert job.reported(workers, StepSkipped) == []
    assert job.losses(workers) == pytest.approx(plain_run(SPEC).losses, rel=2e-2)


def test_the_steps_since_the_last_copies_are_repeated_with_the_weights(make_job: Any, plain_run: Any) -> None:
    spec = {**MEMORY, "checkpoint": {"every_steps": 100}, "elasticity": {"max_workers": 2}}
    job = make_job(memory=True, **spec)
    here, there = job.workers(1, "n1")[0], job.workers(1, "n2")[0]
    there.strike("forward", 6, "kill")
    job.start([here, there], buddy_of=lambda rank: [there, here][rank])
    assert there.died()
    source = job.in_memory(job.interrupt([here]), [here])
    assert source.step <= 6
    assert _exits(job, [here], restore_snapshot=source) == [ExitKind.FINISHED]
    assert job.losses([here]) == pytest.approx(plain_run(MEMORY).losses, rel=1e-6)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("mixed", "It must return the same for every micro-batch, on every rank and in every step"),
        ("rank", "returned a mean for this micro-batch, and on rank 0 (sum, weight). It must"),
        ("negative", "returned the weight -"),
        ("validation", "the weights of the 7 drawn samples of the validation split add up to 0"),
    ],
)
def test_what_has_no_mean_is_refused_in_words(make_job: Any, way: str, said: str) -> None:
    job = make_job(**{**SPEC, "task": "weighted_tasks:Wayward", "model": {"way": way}})
    exits = job.run(job.workers(2))
    errors = [one.error for one in exits if one.error is not None and one.kind is ExitKind.USER_ERROR]
    assert errors
    assert all(said in error.message for error in errors), errors[0].message
    assert all("weighted_tasks.py:" in error.message for error in errors)


def test_a_weight_that_only_a_gpu_has_seen_is_refused_after_the_exchange() -> None:
    """On a GPU a weight that is not allowed becomes nan, and so does the sum over the ranks."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        metrics = Metrics(_exits, torch.device("cpu"), writes_log=False)
        metrics.agree([Share(torch.ones(()), {}, torch.ones((), dtype=torch.float64))])
    finally:
        dist.destroy_process_group()
    assert metrics.weight([3.0]) == 3.0
    with pytest.raises(
        ValueError, match=r"loss\(\) \(test_weights.py:\d+\) returned a weight that is negative or not fin"
    ):
        metrics.weight([float("nan")])


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_step_in_which_nothing_counts_is_one_that_is_not_finite(make_job: Any, policy: str) -> None:
    second = {"way": "nothing", "calls": [6, 7, 8, 9, 10]}
    job = make_job(**{**SPEC, "task": "weighted_tasks:Wayward", "model": second, "health": {"non_finite": policy}})
    workers = job.workers(1)
    [end] = job.run(workers)
    if policy == "skip":
        assert end.kind is ExitKind.FINISHED
        assert [one.step for one in job.reported(workers, StepReport)] == [1, 3, 4]
        assert [(one.step, one.loss) for one in job.reported(workers, StepSkipped)] == [(2, None)]
    else:
        assert end.kind is ExitKind.NON_FINITE and end.error is not None
        assert "weighted_tasks.py:" in end.error.message
        assert "the weights of step 2 add up to 0, so it has no mean loss. Nothing was updated." in end.error.message


def test_a_balance_loss_of_experts_has_no_weight_and_is_refused(make_job: Any, text: str) -> None:
    spec = _text("experts", text)
    job = make_job(**{**spec, "model": {**spec["model"], "balance": "loss"}})
    [end] = job.run(job.workers(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert "Set model.balance to bias, or return a mean." in end.error.message
