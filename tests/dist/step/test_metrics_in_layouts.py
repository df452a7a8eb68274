"""Metrics of a task are those of the one-process run in every layout, and after the death of a rank."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kit.worlds import layout_cases, plain_reference
from shoal_workers.contract.language_model import LanguageModelConfig, plan_of_language_model
from shoal_workers.contract.layout import ContextMethod, Layout, Schedule, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport, ValidationReport

_STEPS = 5
_LAYOUTS = [
    Layout(tp=2),
    Layout(cp=2),
    Layout(cp=2, context=ContextMethod.ULYSSES),
    Layout(pp=2, schedule=Schedule.ONE_F_ONE_B),
    Layout(dp_shard=2, tp=2),
    Layout(cp=2, tp=2),
    Layout(pp=2, cp=2, schedule=Schedule.ONE_F_ONE_B),
]
_ALWAYS = _LAYOUTS[:4]


def _spec(text: str) -> dict[str, Any]:
    spec = layout_cases.spec_of("dense", text, batch={"global_size": 8, "micro_size": 2}, stop={"steps": _STEPS})
    plan = plan_of_language_model(LanguageModelConfig.model_validate(spec["model"]))
    return {**spec, "task": "metered_text:MeteredText", "plan": plan.model_dump(mode="json", exclude_defaults=True)}


@pytest.fixture(scope="session")
def plain(text: str) -> Any:
    """Metrics of each step, and of the validation, in plain torch."""

    @cache
    def run() -> tuple[dict[int, dict[str, float]], dict[str, float]]:
        spec = _spec(text)
        steps = plain_reference.losses(spec, _STEPS)
        return {step: seen[3] for step, seen in steps.items()}, plain_reference.validation_metrics(spec, _STEPS)

    return run


def _cases() -> list[Any]:
    return [
        pytest.param(one, id=f"{one.describe()} {one.context}", marks=[] if one in _ALWAYS else pytest.mark.matrix)
        for one in _LAYOUTS
    ]


@pytest.mark.parametrize("layout", _cases())
def test_a_layout_reduces_metrics_as_one_process_does(make_job: Any, plain: Any, text: str, layout: Layout) -> None:
    job = make_job(**_spec(text))
    workers = job.workers(layout.world_size)
    job.start(workers, layout=layout)
    exits = [worker.exit(timeout_s=150.0) for worker in workers]
    faults = [one.error.traceback for one in exits if one.error]
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * len(workers), "\n".join(faults)
    steps, validation = plain()
    seen = job.reported(workers, StepReport)
    assert {one.step: one.metrics for one in seen} == {
        step: pytest.approx(metrics, abs=1e-5, rel=1e-5) for step, metrics in steps.items()
    }
    assert all(one.metrics["same"] == pytest.approx(one.loss, rel=1e-9) for one in seen), "the very same sum"
    [validated] = job.reported(workers, ValidationReport)
    assert validated.metrics == pytest.approx(validation, abs=1e-5, rel=1e-5)
    assert validated.metrics["two"] == pytest.approx(2.0, rel=1e-12)


TINY: dict[str, Any] = {
    "task": "metered_tasks:Metered",
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": 8},
    "checkpoint": {"every_steps": 3},
    "validation": {"samples": 7},
    "seed": 3,
}


@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_after_the_death_of_a_rank_the_metrics_are_those_of_an_undisturbed_run(make_job: Any, phase: str) -> None:
    job = make_job(memory=True, **TINY)
    workers = job.workers(3)
    workers[0].strike("forward", 4, "hold")
    job.start(workers)
    workers[0].reached()
    job.wait_until_committed(workers, 3)
    workers[1].strike(phase, 5, "kill")
    workers[0].call("go")
    assert workers[1].died()
    survivors = [workers[0], workers[2]]
    job.interrupt(survivors)
    job.finish(survivors, layout=fully_sharded(2), is_recovery=True)
    reference = {step: seen[3] for step, seen in plain_reference.losses(TINY, 8).items()}
    reports = job.reported(survivors, StepReport)
    assert {one.step for one in reports} == set(reference)
    for one in reports:  # also those of a step that was done twice
        assert one.metrics == pytest.approx(reference[one.step], abs=1e-5)
        assert one.metrics["same"] == one.loss
    assert job.reported(survivors, ValidationReport)[-1].metrics == pytest.approx(
        plain_reference.validation_metrics(TINY, 8), abs=1e-5
    )
