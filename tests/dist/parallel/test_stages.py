"""Models that are hard to split into stages train as in one process, or are refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest

from kit.tasks.stage_tasks import PLAN
from shoal_workers.contract.layout import Layout, Recompute, Schedule
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport

_SPEC: dict[str, Any] = {
    "task": "stage_tasks:Staged",
    "plan": {**PLAN, "first": ["embedding", "position"]},
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
_V = Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1))
_INTERLEAVED = Layout(pp=2, schedule=Schedule.INTERLEAVED, stages=(1, 1, 1, 1))
_RECOMPUTED = Layout(pp=2, recompute=Recompute.FULL)


def spec_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {**_SPEC, "model": {"kind": kind}, **changes}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("rich", [_PP2, _V, _INTERLEAVED, _RECOMPUTED, Layout(pp=4)]),
        ("frozen_stage", [_PP2, _V, Layout(pp=2, dp_shard=2)]),
        ("frozen_last", [_PP2, _V]),
        ("checkpointed", [_PP2, _V]),
    ],
)
def test_stages_train_as_one_process(kind: str, layouts: list[Layout], pool_of: Any, plain_run: Any) -> None:
    first = ["embedding", "position"] if kind == "rich" else ["embedding"]
    spec = spec_of(kind, plan={**PLAN, "first": first})
    if kind == "rich":  # its validation draws noise, from the seeds of the engine
        spec["validation"] = {"samples": 4}
    plain = plain_run(spec)
    validations = set()
    for layout in (Layout(), *layouts) if kind == "rich" else layouts:
        seen = pool_of(spec).train(layout)
        assert seen.losses == pytest.approx(plain.losses, abs=2e-6), layout
        assert seen.norms == pytest.approx(plain.norms, abs=2e-6, rel=2e-6), layout
        validations.add(round(seen.validation, 5))
    assert len(validations) == 1 and (kind == "rich" or validations == {round(plain.validation, 5)})


@pytest.mark.parametrize(("kind", "words"), [("twice", "more than once"), ("skip_argument", "in an earlier stage")])
def test_a_refusal_ends_the_job_before_its_first_step(make_job: Any, kind: str, words: str) -> None:
    job = make_job(**spec_of(kind, plan=PLAN))
    group = job.workers(2)
    job.start(group, layout=_PP2)
    ended = group[1].exit()
    assert ended.kind is ExitKind.USER_ERROR and words in ended.error.message
    assert not job.reported(group, StepReport)
