"""Modules with a precision of their own: equal to casts by hand, on every axis, and checkpoints do not depend on it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kit.worlds.layout_cases import spec_of
from shoal_workers.contract.layout import Layout, ShardLevel, fully_sharded
from shoal_workers.contract.messages import ExitKind

_STEPS = 6
SPEC: dict[str, Any] = {
    "task": "cast_tasks:Untied",
    "model": {"dropout": 0.0},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.01, "clip_norm": 1.0},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "snapshot": {"enabled": False},
    "plan": {"blocks": "blocks", "num_blocks": 2, "first": ["embed"], "last": ["head"], "hidden_size": 21},
    "seed": 3,
}
MIXED = {"precision": "bf16", "module_precision": {"*norm": "fp32", "head": "fp32"}}


def _losses(make_job: Any, layout: Layout, name: str = "job", **spec: Any) -> dict[int, float]:
    job = make_job(name, **spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout, restore_from=None)
    found: dict[int, float] = job.losses(workers)
    return found


@pytest.mark.parametrize("layout", [fully_sharded(1), fully_sharded(2)], ids=["fsdp1", "fsdp2"])
def test_losses_are_those_of_casts_by_hand(make_job: Any, reference: Any, layout: Layout) -> None:
    found = _losses(make_job, layout, **SPEC, **MIXED)
    expected = reference(_STEPS, **{**SPEC, "task": "cast_tasks:CastByHand"})
    assert found == pytest.approx(expected, abs=2e-4)
    whole = _losses(make_job, layout, "bf16", **SPEC, precision="bf16")
    assert whole != pytest.approx(expected, abs=2e-4)


def test_short_modules_in_an_fp32_model(make_job: Any, reference: Any) -> None:
    short = {"embed": "bf16", "blocks": "bf16", "*norm": "fp32"}
    found = _losses(make_job, fully_sharded(2), **SPEC, module_precision=short)
    assert found == pytest.approx(reference(_STEPS, **{**SPEC, "task": "cast_tasks:CastByHand"}), abs=2e-4)


def test_fp16_in_one_module_has_a_loss_scale(make_job: Any, reference: Any) -> None:
    found = _losses(make_job, fully_sharded(2), **SPEC, module_precision={"blocks.1": "fp16"})
    expected = reference(_STEPS, **SPEC)
    assert found == pytest.approx(expected, abs=5e-3)
    assert found != expected


_LAYOUTS = {
    "pp2": Layout(pp=2, shard=ShardLevel.OPTIMIZER),
    "tp2": Layout(tp=2),
    "cp2": Layout(cp=2),
    "full recompute": Layout(dp_shard=2, recompute="full"),
    "zero-1": Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER),
}


@pytest.mark.parametrize("name", _LAYOUTS)
def test_every_axis_has_the_losses_of_one_rank(make_job: Any, text: str, name: str) -> None:
    spec = spec_of("dense", text, stop={"steps": 4}, snapshot={"enabled": False}, checkpoint={"every_steps": None})
    spec |= {"precision": "bf16", "module_precision": {"*norm": "fp32", "*.core": "fp32", "blocks.1.*.up": "fp32"}}
    alone = _losses(make_job, fully_sharded(1), "alone", **spec)
    assert _losses(make_job, _LAYOUTS[name], **spec) == pytest.approx(alone, abs=3e-2)


def test_experts_in_fp32(make_job: Any, text: str) -> None:
    spec = spec_of("experts", text, stop={"steps": 4}, snapshot={"enabled": False}, checkpoint={"every_steps": None})
    spec |= {"precision": "bf16", "module_precision": {"*.experts": "fp32"}}
    alone = _losses(make_job, fully_sharded(1), "alone", **spec)
    assert _losses(make_job, Layout(dp_shard=2, ep=2), **spec) == pytest.approx(alone, abs=3e-2)


def test_a_checkpoint_goes_on_in_other_precisions(make_job: Any, reference: Any) -> None:
    """Parameters and optimizer are fp32 whatever computes: the weights after the first steps are the same state."""
    job = make_job("first", **{**SPEC, **MIXED, "checkpoint": {"every_steps": 3}})
    workers = job.workers(2)
    job.start(workers)
    job.wait_until_committed(workers, 3)
    job.interrupt(workers)
    job.commit(workers)
    del job.spec["module_precision"], job.spec["precision"]
    assert [one.kind for one in job.run(job.workers(1))] == [ExitKind.FINISHED]


def test_a_kill_costs_no_completed_step(make_job: Any) -> None:
    spec = {**SPEC, **MIXED, "snapshot": {"budget": 1.0}}
    alone = _losses(make_job, fully_sharded(2), "alone", **spec)
    job = make_job(memory=True, **spec)
    *workers, spare = job.workers(3)
    workers[1].strike("backward", 3, "kill")
    job.start(workers)
    assert workers[1].died()
    group = [workers[0], spare]
    source = job.in_memory(job.interrupt(workers[:1]), group)
    assert source.step == 3
    job.finish(group, restore_snapshot=source)
    assert job.losses(group) == alone


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"*.nrom": "fp32"}, "module_precision '*.nrom' matches no module of the model. The nearest names are"),
        ({"*norm": "fp32", "blocks.*": "fp16"}, "the module 'blocks.0.norm' matches '*norm' (fp32) and 'blocks.*'"),
        ({"head": "fp32"}, "two types to one tied parameter: embed.weight (bf16) and head.weight (fp32)"),
    ],
)
def test_what_cannot_be_is_refused_in_words(make_job: Any, patterns: dict[str, str], words: str) -> None:
    job = make_job(**{**SPEC, "task": "tiny_tasks:Counting", "precision": "bf16", "module_precision": patterns})
    (end,) = job.run(job.workers(1))
    assert end.error is not None
    assert re.search(re.escape(words), str(end.error))
