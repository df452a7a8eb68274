"""Parameters that are one tensor under several names train as one in every layout, named in `plan.tied` or not."""

from __future__ import annotations

from typing import Any

import pytest

from kit.tasks.stage_tasks import PLAN
from shoal_workers.checkpoint.reader import read_catalogue
from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.messages import ExitKind

_SPEC: dict[str, Any] = {
    "task": "stage_tasks:Staged",
    "plan": PLAN,
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.01, "clip_norm": 0.3},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": 4},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 4},
    "elasticity": {"max_workers": 4},
    "snapshot": {"enabled": False},
    "seed": 3,
}
_PP2 = Layout(pp=2)
_PP4 = Layout(pp=4)
_V = Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1))
_INTERLEAVED = Layout(pp=2, schedule=Schedule.INTERLEAVED, stages=(1, 1, 1, 1))
_SHARDED = Layout(pp=2, dp_shard=2)


def spec_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {**_SPEC, "model": {"kind": kind}, **changes}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("ends", [_PP2, _V]),
        ("square", [_PP2]),
        ("inside", [_PP2, _V]),
        ("middle", [_PP4, _INTERLEAVED]),
        ("all", [_V, _SHARDED, _PP4]),
        ("frozen", [_PP2, _V]),
        ("same_block", [_PP2, _INTERLEAVED, _SHARDED]),
    ],
)
def test_a_tie_trains_as_in_one_process(kind: str, layouts: list[Layout], pool_of: Any, plain_run: Any) -> None:
    plain = plain_run(spec_of(kind))
    for layout in layouts:
        seen = pool_of(spec_of(kind)).train(layout)
        assert seen.losses == pytest.approx(plain.losses, abs=2e-6), layout
        assert seen.norms == pytest.approx(plain.norms, abs=2e-6, rel=2e-6), layout
        assert seen.validation == pytest.approx(plain.validation, abs=2e-6), layout


def test_a_checkpoint_holds_a_tie_once_and_any_layout_reads_it(make_job: Any, reference: Any) -> None:
    spec = spec_of("all", checkpoint={"every_steps": 2}, stop={"steps": 6})
    expected = reference(6, **spec)
    job = make_job(**spec)
    job.run(job.workers(2), layout=_V)
    first = next(directory for directory in job.committed if "step-000000000002" in directory)
    names, _ = read_catalogue(first)
    assert [name for name in names if "up.weight" in name and "model" in name] == ["model.blocks.0.up.weight"]
    assert not any("head" in name for name in names)
    for layout in (Layout(dp_shard=2), _PP4):
        group = job.workers(layout.world_size)
        job.finish(group, layout=layout, restore_from=first)
        losses = {report.step: report.loss for report in job.reports(group[0])}
        assert losses == pytest.approx({step: expected[step] for step in range(3, 7)}, abs=2e-6), layout


def test_a_tie_that_the_model_does_not_have_is_refused(make_job: Any) -> None:
    job = make_job(**spec_of("plain", plan={**PLAN, "tied": {"head.weight": "embedding.weight"}}))
    (ended,) = job.run(job.workers(1))
    assert ended.kind is ExitKind.USER_ERROR
    assert "head.weight is embedding.weight" in ended.error.message and "two parameters" in ended.error.message
