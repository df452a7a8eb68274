"""BatchNorm over the global batch: one process that holds the whole batch computes the same, with torch's BatchNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.worlds import plain_reference
from shoal_workers.checkpoint.reader import load, read_catalogue
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.layout import Layout, Recompute, ShardLevel, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport, ValidationReport

STEPS = 5
SPEC: dict[str, Any] = {
    "task": "synced_tasks:Task",
    "batch": {"global_size": 18, "micro_size": 2, "sync": "global"},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5, "eps": 1e-3},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 8},
    "elasticity": {"max_workers": 4},
    "seed": 7,
}
PLAN = {"blocks": "blocks", "num_blocks": 2, "first": ["stem", "norm"], "last": ["plain", "head"], "hidden_size": 6}
WHOLE: dict[str, Any] = {"batch": {"global_size": 18, "micro_size": 18}, "elasticity": {"max_workers": 1}}


def assert_as_one_batch(job: Any, workers: Any, spec: dict[str, Any]) -> None:
    """Losses, norms, metrics, validation, and the buffers of the last checkpoint."""
    spec = {**spec, **WHOLE}
    validation, plain = plain_reference.validation_loss(spec, STEPS)
    reports = job.reported(workers, StepReport)
    assert reports[-1].step == STEPS
    for one in reports:
        loss, norm, _, metrics = plain[one.step]
        assert (one.loss, one.grad_norm) == pytest.approx((loss, norm), rel=1e-6, abs=1e-6), one.step
        assert one.metrics == pytest.approx(metrics, rel=1e-6)
    assert job.reported(workers, ValidationReport)[-1].loss == pytest.approx(validation, rel=1e-6)
    catalogue, _ = read_catalogue(job.committed[-1])
    state = {name: torch.empty_like(one, device="cpu") for name, one in catalogue.items() if name.startswith("model.")}
    load(state, directory=job.committed[-1])
    buffers = dict(plain_reference.train(spec, STEPS)[3].named_buffers())
    assert buffers
    for name, value in buffers.items():
        torch.testing.assert_close(state[f"model.{name}"], value, rtol=1e-6, atol=1e-9)


def run(make_job: Any, layout: Layout, spec: dict[str, Any], name: str = "job") -> tuple[Any, Any]:
    job = make_job(name, **spec)
    workers = job.workers(layout.world_size)
    ends = job.run(workers, layout=layout)
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * len(workers), [
        end.error and end.error.traceback for end in ends
    ]
    return job, workers


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2),
        Layout(dp_shard=1),
        Layout(dp_shard=3, shard=ShardLevel.OPTIMIZER),
        Layout(dp_shard=4),
        Layout(dp_shard=2, dp_replicate=2),
        Layout(dp_shard=2, recompute=Recompute.FULL),
    ],
    ids=lambda one: f"{one.describe()} {one.shard}",
)
def test_every_layout_of_the_data_axes_trains_as_one_process_with_the_whole_batch(
    make_job: Any, layout: Layout
) -> None:
    """Nine micro-batches: on four ranks they are 3, 2, 2 and 2."""
    spec = {**SPEC, **({"plan": PLAN} if layout.recompute is Recompute.FULL else {})}
    assert_as_one_batch(*run(make_job, layout, spec), SPEC)


@pytest.mark.parametrize("change", [{"model": {"sums": True}}, {"task": "synced_tasks:Converted"}])
def test_sums_with_weights_and_sync_batch_norm_of_torch_are_taken(make_job: Any, change: dict[str, Any]) -> None:
    spec = {**SPEC, **change}
    job, workers = run(make_job, fully_sharded(2), spec)
    assert_as_one_batch(job, workers, {**spec, "task": "synced_tasks:Task"})


def test_micro_batches_of_other_sizes_change_nothing(make_job: Any) -> None:
    spec = {**SPEC, "batch": {"global_size": 18, "micro_size": 6, "sync": "global"}, "elasticity": {"max_workers": 2}}
    assert_as_one_batch(*run(make_job, fully_sharded(2), spec), spec)


def test_bfloat16_stays_near(make_job: Any) -> None:
    job, workers = run(make_job, fully_sharded(2), {**SPEC, "model": {"half": True}, "precision": "bf16"})
    plain = plain_reference.losses({**SPEC, **WHOLE, "model": {"half": True}}, STEPS)
    assert job.losses(workers) == pytest.approx({step: seen[0] for step, seen in plain.items()}, rel=8e-2)
    assert job.losses(workers)[1] == pytest.approx(plain[1][0], rel=1e-2)


def test_a_killed_rank_and_a_resize_change_nothing(make_job: Any) -> None:
    job = make_job(memory=True, **{**SPEC, "snapshot": {"budget": 1.0}})
    workers = job.workers(3)
    workers[1].strike("backward", 2, "kill")
    job.start(workers)
    assert workers[1].died()
    survivors = [workers[0], workers[2]]
    source = job.in_memory(job.interrupt(survivors), survivors)
    assert source.step == 2
    source = job.lose(survivors, survivors[1], "forward", 3, restore_snapshot=source)
    group = [survivors[0], *job.workers(3)]
    job.finish(group, restore_snapshot=source)
    assert_as_one_batch(job, group, SPEC)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "synced_tasks:Branches"}, "the ranks do not call the same BatchNorm layers"),
        ({"model": {"dropout": 0.1}}, "draws random numbers (dropout, noise), and batch.sync is global"),
        ({"task": "synced_tasks:Own"}, "OwnNorm is a BatchNorm with a forward() of its own"),
        ({"task": "synced_tasks:NoNorm"}, "the model has no BatchNorm"),
        ({"task": "contrastive_tasks:Clip"}, "Set batch.sync to micro_batch"),
        (
            {"task": "synced_tasks:Converted", "batch": {**SPEC["batch"], "sync": "micro_batch"}},
            "Set batch.sync to global",
        ),
    ],
)
def test_what_would_depend_on_the_number_of_workers_is_refused_in_words(
    make_job: Any, change: dict[str, Any], words: str
) -> None:
    job = make_job(**{**SPEC, **change})
    ends = job.run(job.workers(2))
    errors = [end.error for end in ends if end.error is not None and end.kind is ExitKind.USER_ERROR]
    assert errors and all(words in error.message for error in errors), [end.error for end in ends]


@pytest.mark.parametrize("change", [{"deterministic": True}, {"compile": True}])
def test_settings_that_exclude_it_are_refused_at_submit(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"batch\.sync"):
        parse_spec({**SPEC, **change})
