"""Ranks stop after the same validation, and save what is among the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.spec import ValidationSpec
from shoal_workers.contract.validation import judge
from shoal_workers.contract.worker_reports import StepReport, ValidationReport

SPEC: dict[str, Any] = {
    "stop": {"steps": 40},
    "optimizer": {"lr": 1e-9},  # nothing improves
    "schedule": {"name": "constant", "warmup_steps": 0},
    "checkpoint": {"every_steps": None, "keep_best": 1},
    "batch": {"global_size": 4, "micro_size": 1},
    "validation": {"every_steps": 2, "patience": 2, "min_delta": 0.5},
}


def test_all_ranks_stop_after_the_same_validation_with_a_saved_state(make_job: Any) -> None:
    job = make_job(**SPEC)
    group = job.workers(2)
    ends = job.run(group)
    assert [(end.kind, end.step) for end in ends] == [(ExitKind.FINISHED, 6)] * 2
    reports = job.reported([group[0]], ValidationReport)
    assert [report.step for report in reports] == [2, 4, 6]
    saved = [int(Path(directory).name[5:17]) for directory in job.committed]
    assert saved[-1] == 6, "the last step, whatever its validation was"
    rule, standing = ValidationSpec.model_validate(SPEC["validation"]), None
    expected = []
    for report in reports:
        standing = judge(standing, rule, 1, step=report.step, loss=report.loss, metrics=report.metrics)
        expected += [report.step] if report.step in standing.kept_steps and report.step != 6 else []
    assert saved[:-1] == expected

    # the next group of the job knows what the validations before have shown, and adds no step
    again = job.run(group, restore_from=job.committed[-1], standing=standing)
    assert [(end.kind, end.step) for end in again] == [(ExitKind.FINISHED, 6)] * 2
    assert len(job.reported([group[0]], StepReport)) == 6
