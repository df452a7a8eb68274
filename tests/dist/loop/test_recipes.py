"""Ordinary recipes train as plain torch does: at two workers, after a kill, and from a checkpoint at one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_loop
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed, StepReport

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "kit" / "loops" / "recipes.py"
REFUSED = "accumulation"
NAMES = [name for name in re.findall(r"^@recipe\ndef (\w+)", FILE.read_text("utf-8"), re.MULTILINE) if name != REFUSED]
SAVED_AFTER, KILLED_IN = 7, 5
TOLERANCE = {"autocast": 2e-3}
"""Relative; by default that of rounding."""


def spec_of(name: str) -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": str(FILE.relative_to(ROOT)), "args": [name]},
        "elasticity": {"max_workers": plain_loop.MOST_WORKERS},
        "checkpoint": {"every_steps": SAVED_AFTER},
        "snapshot": {"budget": 1.0},
    }


def compare(job: Any, workers: list[Any], name: str, steps: range) -> None:
    """Losses, and what would come out, which is the sum of magnitudes that the loop has logged."""
    losses, logged = plain_loop.undisturbed(FILE, name)
    out = dict(zip(losses, (metrics["out"] for metrics in logged.values()), strict=True))
    tolerance = TOLERANCE.get(name, 1e-5)
    reports = {report.step: report for report in job.reported(workers, StepReport)}
    late = [group.past for group in job.reported(workers, GroupFormed)[1:]]  # of a step that was broken off
    reports |= {report.step: report for past in late for report in past}
    assert reports.keys() == {*steps}
    for step, report in reports.items():
        assert report.metrics["out"] == pytest.approx(out[step], rel=tolerance), step
        assert report.loss is None or report.loss == pytest.approx(losses[step], rel=tolerance, abs=5e-7), step


@pytest.mark.cells(3, 8)
@pytest.mark.parametrize("name", NAMES)
def test_a_kill_and_a_checkpoint_change_no_loss_and_no_model(make_job: Any, name: str) -> None:
    num_steps = max(plain_loop.undisturbed(FILE, name)[0])
    job = make_job(memory=True, **spec_of(name))
    workers = job.workers(2)
    workers[1].strike("backward", KILLED_IN, "kill")
    job.start(workers, layout=replicated(2))
    assert workers[1].died()
    source = job.in_memory(job.interrupt(workers[:1]), workers[:1])
    [end] = job.run(workers[:1], layout=replicated(1), restore_snapshot=source)
    assert end.kind is ExitKind.FINISHED, end
    compare(job, workers[:1], name, range(1, num_steps + 1))

    [early] = [directory for directory in job.committed if f"step-{SAVED_AFTER:012d}" in directory]
    resumed = make_job("resumed", **spec_of(name))
    [end] = resumed.run(alone := resumed.workers(1), layout=replicated(1), restore_from=early)
    assert end.kind is ExitKind.FINISHED, end
    compare(resumed, alone, name, range(SAVED_AFTER + 1, num_steps + 1))


def test_gradients_that_are_accumulated_over_steps_are_refused_with_their_name(make_job: Any) -> None:
    """Between two steps they would be lost with a worker."""
    job = make_job(**spec_of(REFUSED))
    [end] = job.run(job.workers(1), layout=replicated(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None, end
    assert "Not tracked, and not the same then: gradients that no update has used (no variable)." in end.error.message
