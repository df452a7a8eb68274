"""A new model has the same weights in every layout, bit by bit, though no worker has drawn more than its own part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.worlds import layout_cases
from kit.worlds.plain_reference import whole_model
from kit.worlds.whole_states import whole
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout, Schedule, ShardLevel
from shoal_workers.tasks.lm import LanguageModel

LAYOUTS = {
    "one": Layout(),
    "fsdp3": Layout(dp_shard=3),
    "hsdp2x2": Layout(dp_replicate=2, dp_shard=2),
    "zero1": Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER),
    "tp2": Layout(tp=2),
    "tp4": Layout(tp=4),
    "fsdp2xtp2": Layout(dp_shard=2, tp=2),
    "cp2": Layout(cp=2),
    "pp2": Layout(pp=2, schedule=Schedule.ONE_F_ONE_B, stages=(3, 1)),
    "pp2v": Layout(pp=2, schedule=Schedule.DUAL_PIPE_V, stages=(1, 1, 1, 1)),
    "pp2xtp2": Layout(pp=2, tp=2, schedule=Schedule.ONE_F_ONE_B, stages=(2, 2)),
}
EXPERTS = {
    "one": Layout(),
    "fsdp4xep2": Layout(dp_shard=4, ep=2),
    "fsdp2xep2xtp2": Layout(dp_shard=2, ep=2, tp=2),
    "pp2xfsdp2xep2": Layout(pp=2, dp_shard=2, ep=2, schedule=Schedule.ONE_F_ONE_B, stages=(2, 2)),
}


def _drawn(make_job: Any, spec: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The model's tensors before the first step, assembled from the ranks' parts."""
    job = make_job(**spec)
    workers = job.workers(layout.world_size)
    for worker in workers:
        worker.strike("forward", 0, "dump")
    job.finish(workers, layout=layout, store_timeout_s=90.0)
    return {name: value for name, value in whole([worker.dumped() for worker in workers]).items() if "model." in name}


def _assert_whole(make_job: Any, spec: dict[str, Any], layout: Layout) -> None:
    parsed = parse_spec(spec)
    expected = whole_model(LanguageModel(parsed.model, parsed.data, parsed.seed), parsed.seed).state_dict()
    drawn = _drawn(make_job, spec, layout)
    for name, values in drawn.items():
        assert values.tobytes() == expected[name.removeprefix("model.")].numpy().tobytes(), name
    left = {name for name in expected if f"model.{name}" not in drawn}
    assert left <= {"head.weight"} and bool(left) == spec["model"].get("tied_head", True)
    assert not torch.equal(expected["blocks.0.attention.query.weight"], expected["blocks.1.attention.query.weight"])


def _spec(model: str, text: str) -> dict[str, Any]:
    batch = {"global_size": 8, "micro_size": 1}
    return layout_cases.spec_of(model, text, batch=batch, stop={"steps": 1}, validation={"samples": 0})


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_dense_model(make_job: Any, text: str, name: str) -> None:
    _assert_whole(make_job, _spec("dense", text), LAYOUTS[name])


@pytest.mark.parametrize("name", list(EXPERTS))
def test_a_model_with_experts(make_job: Any, text: str, name: str) -> None:
    _assert_whole(make_job, _spec("experts", text), EXPERTS[name])
