"""Parameter groups of a task's optimizer are those of the whole model in every stage of a pipeline and in shards."""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds import plain_reference
from shoal_workers.contract.layout import Layout, Schedule, ShardLevel, fully_sharded, plain
from shoal_workers.contract.worker_reports import StepReport

_STEPS = 4
SPEC: dict[str, Any] = {
    "task": "grouped_tasks:Grouped",
    "batch": {"global_size": 12, "micro_size": 3},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "snapshot": {"enabled": False},
    "plan": {"blocks": "blocks", "num_blocks": 4, "first": ["embed"], "last": ["head"], "hidden_size": 24},
    "seed": 7,
}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, schedule=Schedule.ONE_F_ONE_B, shard=ShardLevel.OPTIMIZER),
        Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1), shard=ShardLevel.OPTIMIZER),
    ],
    ids=["1f1b", "zbv"],
)
@pytest.mark.parametrize("task", ["Grouped", "FirstHalfFrozen"])
def test_groups_by_position_and_by_name_are_those_of_the_whole_model(make_job: Any, task: str, layout: Layout) -> None:
    spec = {**SPEC, "task": f"grouped_tasks:{task}"}
    job = make_job("job", **spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    plain = plain_reference.losses(spec, _STEPS)
    assert {one.step: one.loss for one in job.reported(workers, StepReport)} == pytest.approx(
        {step: values[0] for step, values in plain.items()}, abs=2e-6
    )


@pytest.mark.parametrize("layout", [plain(2), fully_sharded(2)], ids=["whole", "sharded"])
def test_an_optimizer_reads_attributes_that_the_model_has_set_on_parameters(make_job: Any, layout: Layout) -> None:
    spec = {**SPEC, "task": "grouped_tasks:Attributed"}
    job = make_job("job", **spec)
    workers = job.workers(2)
    job.finish(workers, layout=layout)
    plain_losses = {step: values[0] for step, values in plain_reference.losses(spec, _STEPS).items()}
    assert job.losses(workers) == pytest.approx(plain_losses, abs=2e-6)
