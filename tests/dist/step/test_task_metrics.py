"""Metrics of a task's own: those of the one-process run at any world size, layout and mode, and refused clearly."""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds import plain_reference
from shoal_workers.contract.layout import Layout, Schedule, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport, ValidationReport

_STEPS = 4
SPEC: dict[str, Any] = {
    "task": "metered_tasks:Metered",
    "batch": {"global_size": 15, "micro_size": 3},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 7},
    "snapshot": {"enabled": False},
    "seed": 7,
}
STAGED: dict[str, Any] = {
    **SPEC,
    "task": "metered_tasks:Staged",
    "plan": {"blocks": "blocks", "num_blocks": 4, "first": ["embed"], "last": ["head"], "hidden_size": 24},
}


def _seen(job: Any, workers: Any) -> tuple[dict[int, StepReport], list[ValidationReport]]:
    return {one.step: one for one in job.reported(workers, StepReport)}, job.reported(workers, ValidationReport)


def _run(make_job: Any, name: str, layout: Layout, **spec: Any) -> tuple[dict[int, StepReport], list[ValidationReport]]:
    job = make_job(name, **spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    return _seen(job, workers)


def _assert_as_one_process(seen: tuple[dict[int, StepReport], list[ValidationReport]], spec: dict[str, Any]) -> None:
    steps, (validation,) = seen
    plain = plain_reference.losses(spec, _STEPS)
    assert {step: one.loss for step, one in steps.items()} == pytest.approx(
        {step: values[0] for step, values in plain.items()}, abs=1e-5
    )
    for step, one in steps.items():
        assert one.metrics == pytest.approx(plain[step][3], abs=1e-5)
        assert one.metrics["same"] == one.loss
    assert validation.metrics == pytest.approx(plain_reference.validation_metrics(spec, _STEPS), abs=1e-5)
    assert validation.metrics["same"] == pytest.approx(validation.loss, rel=1e-12)
    assert list(validation.metrics) == ["accuracy", "data/first", "same", "two"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_world_size_gives_the_metrics_of_the_plain_run(make_job: Any, world_size: int) -> None:
    _assert_as_one_process(_run(make_job, "job", fully_sharded(world_size), **SPEC), SPEC)


def test_a_pipeline_of_which_only_the_last_stage_has_them_reports_the_same(make_job: Any) -> None:
    layout = Layout(pp=2, schedule=Schedule.ONE_F_ONE_B)
    _assert_as_one_process(_run(make_job, "job", layout, **STAGED), STAGED)


def test_in_deterministic_mode_they_have_the_same_bits_at_every_world_size(make_job: Any) -> None:
    spec = {**SPEC, "deterministic": True}
    one, three = (_run(make_job, f"world-{n}", fully_sharded(n), **spec) for n in (1, 3))
    assert {step: report.metrics for step, report in one[0].items()} == {
        step: report.metrics for step, report in three[0].items()
    }
    assert [report.metrics for report in one[1]] == [report.metrics for report in three[1]]
    assert all(report.metrics["same"] == report.loss for report in three[0].values())


def test_the_losses_are_those_of_the_same_task_without_metrics(make_job: Any) -> None:
    with_metrics, _ = _run(make_job, "with", fully_sharded(3), **SPEC)
    without, _ = _run(make_job, "without", fully_sharded(3), **{**SPEC, "task": "tiny_tasks:Counting"})
    assert [report.loss for report in with_metrics.values()] == [report.loss for report in without.values()]
    assert all(report.metrics == {} for report in without.values())


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("rank", "the metrics a for this micro-batch, and on rank 0 the metrics a, b."),
        ("step", "no metrics for this micro-batch, and for the micro-batches before the metrics a."),
        ("text", "the metric 'a' as a str, '0.5'. A value is one number"),
    ],
)
def test_names_that_differ_end_the_run_in_words(make_job: Any, way: str, said: str) -> None:
    job = make_job(**{**SPEC, "task": "metered_tasks:Wayward", "model": {"way": way}})
    workers = job.workers(2)
    exits = job.run(workers)
    errors = [one.error for one in exits if one.error is not None and one.kind is ExitKind.USER_ERROR]
    assert errors
    assert all(said in error.message for error in errors), errors[0].message
    assert all("metered_tasks.py:" in error.message for error in errors)


def test_a_metric_that_is_not_finite_is_left_out_and_training_goes_on(make_job: Any) -> None:
    steps, (validation,) = _run(
        make_job, "job", fully_sharded(2), **{**SPEC, "task": "metered_tasks:Wayward", "model": {"way": "nan"}}
    )
    assert [report.metrics for report in steps.values()] == [{"b": pytest.approx(2.0)}] * _STEPS
    assert validation.metrics == {"b": pytest.approx(2.0)}
