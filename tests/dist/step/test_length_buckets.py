"""Micro-batches of similar lengths train as one process does at every world size, and as samples without padding do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.worlds.plain_reference import whole_model
from shoal_workers.contract.layout import Layout, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.engine.length_buckets import LengthBuckets

_STEPS = 6
SPEC: dict[str, Any] = {
    "task": "ragged_tasks:Ragged",
    "batch": {"global_size": 5, "micro_size": 1},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 4},
    "snapshot": {"enabled": False},
    "seed": 7,
}


def _assert_equal(seen: Any, plain: Any) -> None:
    assert seen.losses == pytest.approx(plain.losses, rel=1e-6)
    assert seen.norms == pytest.approx(plain.norms, rel=1e-5)
    assert seen.validation == pytest.approx(plain.validation, rel=1e-6)
    assert {step: one["same"] for step, one in seen.metrics.items()} == pytest.approx(seen.losses, rel=1e-6)


@pytest.mark.cells(3, 4)
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(dp_shard=2), fully_sharded(3), Layout(dp_replicate=2)],
    ids=["1", "2", "3", "2 replicas"],
)
def test_every_world_size_equals_the_plain_loop(pool_of: Any, plain_run: Any, layout: Layout) -> None:
    """Five micro-batches: two and three ranks have different numbers of them, and padding."""
    _assert_equal(pool_of(SPEC).train(layout), plain_run(SPEC))


def test_a_step_is_the_mean_over_its_tokens_as_if_each_sample_were_alone(make_job: Any) -> None:
    from ragged_tasks import Ragged  # as the workers, by the path of kit/tasks

    job = make_job(**{**SPEC, "stop": {"steps": 1}})
    workers = job.workers(2)
    job.finish(workers)
    task = Ragged({}, {}, 7)
    model, data = whole_model(task, 7), task.build_dataset("train")
    buckets = LengthBuckets(data, 7)
    members = [number for at in range(5) for number in buckets.members(at)]
    assert len(members) > 5
    with torch.no_grad():
        alone = [task.loss(model, task.collate([data[number]])) for number in members]
    assert all(float(metrics["padding"]) == 0 for *_, metrics in alone)
    mean = sum(float(total) for total, *_ in alone) / sum(float(num) for _, num, _ in alone)
    assert job.losses(workers) == pytest.approx({1: mean}, rel=1e-6)


def test_in_deterministic_mode_all_bits_are_equal_at_every_world_size(pool_of: Any, plain_run: Any) -> None:
    one, two = (pool_of({**SPEC, "deterministic": True}).train(fully_sharded(size)) for size in (1, 2))
    assert one == two
    _assert_equal(two, plain_run(SPEC))


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "ragged_tasks:MeanRagged"}, "loss() returned a mean, and the dataset has tokens_per_micro_batch"),
        ({"batch": {"global_size": 4, "micro_size": 2}}, "batch.micro_size is 2. Set it to 1"),
        ({"data": {"budget": 39}}, "Texts.tokens_per_micro_batch is 39, and the longest sample has 40 tokens"),
    ],
    ids=["a mean", "micro_size", "budget"],
)
def test_what_cannot_be_exact_is_refused_in_words(make_job: Any, changes: dict[str, Any], said: str) -> None:
    job = make_job(**{**SPEC, **changes})
    [worker] = job.workers(1)
    [end] = job.run([worker])
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert said in end.error.message
