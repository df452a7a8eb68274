"""fp8: losses near those of bf16 on every axis, equal over a kill, and refused in words where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds.layout_cases import spec_of
from shoal_workers.contract.layout import Layout, Schedule, ShardLevel, fully_sharded

pytest.importorskip("torchao")
_STEPS = 6
_SIZES = {"dim": 64, "num_layers": 2, "num_heads": 4, "hidden_dim": 128, "seq_len": 32}
"""All sides of all parts of layers on two tp ranks are multiples of 16."""
_LAYOUTS = {
    "fsdp2": Layout(dp_shard=2),
    "dp2": Layout(dp_replicate=2),
    "tp2": Layout(tp=2),
    "cp2": Layout(cp=2),
    "pp2": Layout(pp=2, shard=ShardLevel.OPTIMIZER),
    "zbv": Layout(pp=2, shard=ShardLevel.OPTIMIZER, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1)),
    "zero-1": Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER),
    "recompute full": Layout(recompute="full"),
    "recompute selective": Layout(recompute="selective"),
}


def _spec(text: str, **changes: Any) -> dict[str, Any]:
    changes = {"stop": {"steps": _STEPS}, "snapshot": {"enabled": False}, "precision": "bf16", **changes}
    model = changes.pop("model", {})
    return {**spec_of("dense", text, **changes), "model": {**_SIZES, **model}}


def _losses(make_job: Any, layout: Layout, name: str, spec: dict[str, Any]) -> dict[int, float]:
    job = make_job(name, **spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout, restore_from=None)
    losses: dict[int, float] = job.losses(workers)
    return losses


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
def test_losses_are_near_those_of_bf16(make_job: Any, text: str, scales: str) -> None:
    bf16 = _losses(make_job, fully_sharded(1), "bf16", _spec(text))
    fp8 = _losses(make_job, fully_sharded(1), "fp8", _spec(text, fp8=scales))
    assert fp8 == pytest.approx(bf16, abs=0.05)
    assert all(fp8[step] != bf16[step] for step in bf16)


@pytest.mark.parametrize("name", _LAYOUTS)
def test_every_axis_has_the_losses_of_one_rank(make_job: Any, text: str, name: str) -> None:
    layers = {"num_layers": 4} if name == "zbv" else {}
    spec = _spec(text, fp8="tensorwise", model=layers)
    alone = _losses(make_job, fully_sharded(1), "alone", spec)
    assert _losses(make_job, _LAYOUTS[name], name, spec) == pytest.approx(alone, abs=0.05)


def test_experts_train_beside_layers_in_fp8(make_job: Any, text: str) -> None:
    model = {"num_experts": 4, "top_k": 2, "num_shared_experts": 1, "expert_hidden_dim": 32, "tied_head": False}
    spec = _spec(text, fp8="rowwise", model=model)
    alone = _losses(make_job, fully_sharded(1), "alone", spec)
    assert _losses(make_job, Layout(dp_shard=2, ep=2), "ep2", spec) == pytest.approx(alone, abs=0.05)


def test_deterministic_losses_have_the_same_bits_on_one_and_two_workers(make_job: Any, text: str) -> None:
    spec = _spec(text, fp8="tensorwise", deterministic=True)
    alone = _losses(make_job, fully_sharded(1), "alone", spec)
    assert _losses(make_job, fully_sharded(2), "two", spec) == alone


def test_a_kill_changes_no_loss(make_job: Any, text: str) -> None:
    spec = _spec(text, fp8="tensorwise", snapshot={"budget": 1.0})
    undisturbed = _losses(make_job, fully_sharded(2), "undisturbed", spec)
    job = make_job(memory=True, **spec)
    *workers, spare = job.workers(3)
    workers[1].strike("backward", 3, "kill")
    job.start(workers)
    assert workers[1].died()
    group = [workers[0], spare]
    source = job.in_memory(job.interrupt(workers[:1]), group)
    job.finish(group, restore_snapshot=source)
    assert job.losses(group) == undisturbed
