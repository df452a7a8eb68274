"""A moving average of the weights is validated, exported, and survives what moments survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kit.worlds import plain_reference
from shoal_workers.contract.layout import Layout, Schedule, ShardLevel, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SnapshotCost, ValidationReport
from shoal_workers.export import export

STEPS = 8
SPEC: dict[str, Any] = {
    "batch": {"global_size": 12, "micro_size": 2},
    "optimizer": {"lr": 0.02, "ema_decay": 0.7},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 3},
    "validation": {"samples": 9, "every_steps": 3},
    "elasticity": {"max_workers": 4},
    "snapshot": {"budget": 1e-6},
    "seed": 3,
}
STAGED = {
    "task": "metered_tasks:Staged",
    "plan": {"blocks": "blocks", "num_blocks": 4, "first": ["embed"], "last": ["head"], "hidden_size": 24},
}


def _validated(job: Any, workers: Any) -> dict[int, float]:
    return {one.step: one.loss for one in job.reported(workers, ValidationReport)}


def _expected(spec: dict[str, Any], *steps: int) -> dict[int, float]:
    return {step: plain_reference.validation_loss(spec, step)[0] for step in steps}


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (fully_sharded(3), {}),
        (Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER), {}),
        (Layout(dp_replicate=2), {"optimizer": {"name": "sgd", "lr": 0.3, "ema_decay": 0.7}}),
        (fully_sharded(2), {"optimizer": {"name": "adafactor", "lr": 0.05, "ema_decay": 0.7}}),
        (Layout(pp=2, schedule=Schedule.ONE_F_ONE_B, shard=ShardLevel.OPTIMIZER), STAGED),
    ],
    ids=["fsdp3", "zero1", "sgd-dp2", "adafactor", "pp2"],
)
def test_validation_is_that_of_the_averages_and_training_that_of_the_weights(
    make_job: Any, layout: Layout, changes: dict[str, Any]
) -> None:
    spec = {**SPEC, **changes}
    job = make_job(**spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    plain = {step: values[0] for step, values in plain_reference.losses(spec, STEPS).items()}
    assert job.losses(workers) == pytest.approx(plain, rel=1e-6)
    assert _validated(job, workers) == pytest.approx(_expected(spec, 3, 6, STEPS), rel=1e-6)


@pytest.mark.parametrize("world", [3, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_death_and_a_resize_keep_the_averages(make_job: Any, world: int) -> None:
    """One of two dies after five steps; the other goes on in a group of another size."""
    job = make_job(memory=True, **SPEC)
    survivor, source = job.lose_one_of_two("forward", 5)
    assert source.step == 5
    group = [survivor, *job.workers(world - 1)]
    job.finish(group, restore_snapshot=source)
    assert job.reported(group, SnapshotCost)[0].copies_reason == ""
    assert _validated(job, group) == pytest.approx(_expected(SPEC, 3, 6, STEPS), rel=1e-6)


def test_a_death_within_a_validation_leaves_the_weights_of_the_last_step(make_job: Any, reference: Any) -> None:
    """The memory that others restore from is not written while the model refers to averages."""
    job = make_job(memory=True, **SPEC)
    survivor, source = job.lose_one_of_two("validating", 6)
    assert source.step == 6
    assert [end.kind for end in job.run([survivor], restore_snapshot=source)] == [ExitKind.FINISHED]
    plain = reference(STEPS, **SPEC)
    losses = job.losses([survivor])
    assert {7, 8} <= losses.keys() and losses == pytest.approx({step: plain[step] for step in losses}, rel=1e-6)


def test_an_export_has_the_averages_unless_the_weights_are_asked_for(make_job: Any, tmp_path: Path) -> None:
    groups = [{"match": "blocks.0.*", "frozen": True}]
    spec = {**SPEC, "optimizer": {**SPEC["optimizer"], "groups": groups}}
    job = make_job(**spec)
    job.run(job.workers(2))
    _, _, _, model = plain_reference.train(spec, STEPS)
    weights = dict(model.named_parameters())
    for raw, expected in ((False, model.averages), (True, weights)):
        out = tmp_path / f"raw-{raw}"
        export(job.root, out, raw=raw)
        written = load_file(out / "model.safetensors")
        for name, tensor in written.items():
            torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(
        load_file(tmp_path / "raw-True/model.safetensors")["embed.weight"], model.averages["embed.weight"]
    )


@pytest.mark.matrix
def test_averages_may_begin_and_end_in_a_job_that_goes_on(make_job: Any) -> None:
    """They begin with the weights, and the moments are kept."""
    without = {**SPEC, "optimizer": {"lr": 0.02}, "stop": {"steps": 6}, "schedule": {"warmup_steps": 2, "steps": STEPS}}
    first = make_job("first", **without)
    first.run(first.workers(2))
    spec = {**without, "optimizer": SPEC["optimizer"], "stop": {"steps": STEPS}}
    job = make_job("first", **spec)
    workers = job.workers(3)
    job.finish(workers)
    plain = {
        step: values[0] for step, values in plain_reference.losses({**without, "stop": {"steps": STEPS}}, STEPS).items()
    }
    losses = job.losses(workers)
    assert losses == pytest.approx({step: plain[step] for step in losses}, rel=1e-6) and STEPS in losses
