"""What a script logs with the package `shoal`, as step reports."""

from typing import Any

import pytest

from kit.views import assignment
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.worker_reports import StepReport, ValidationReport
from shoal_workers.script.hook import LoggedSteps

ASSIGNMENT = assignment(generation=4, layout=Layout(dp_replicate=3))


class Logged:
    def __init__(self) -> None:
        self.remarks: list[str] = []
        self._steps = LoggedSteps(ASSIGNMENT, 100.0, self.remarks.append)

    def __call__(self, step: Any, at: Any = 101.0, **values: Any) -> StepReport | None:
        return self._steps.report_of({"step": step, "at": at, **values})


@pytest.fixture
def logged() -> Logged:
    return Logged()


def test_all_values_are_passed_on(logged: Logged) -> None:
    values = {"loss": 0.5, "lr": 1e-3, "grad_norm": 2, "tokens": 4096.0, "total_steps": 90.0, "metrics": {"acc": 1}}
    report = logged(1, **values)
    assert report is not None
    assert (report.loss, report.lr, report.grad_norm, report.tokens, report.total_steps) == (0.5, 1e-3, 2.0, 4096, 90)
    assert report.metrics == {"acc": 1.0}


def test_the_time_of_a_step_is_that_between_two_logs_by_the_number_of_steps(logged: Logged) -> None:
    reports = [logged(10, 105.0), logged(20, 110.0), logged(21, 112.0)]
    assert [report and report.step_s for report in reports] == [5.0, 0.5, 2.0]


def test_a_step_that_was_logged_before_is_no_further_report(logged: Logged) -> None:
    assert logged(5) is not None
    assert logged(5) is None and logged(4) is None


@pytest.mark.parametrize("message", [{}, {"step": "7"}, {"step": -1, "at": 1.0}, {"step": 1}, {"step": 1, "at": "now"}])
def test_what_is_no_message_of_the_package_is_dropped(message: dict[str, Any]) -> None:
    assert LoggedSteps(ASSIGNMENT, 100.0, lambda _: None).report_of(message) is None


def test_a_value_that_is_not_finite_is_left_out_and_said_once(logged: Logged) -> None:
    for step in (3, 4):
        report = logged(step, loss=float("nan"), metrics={"acc": float("inf"), "ok": 1.0})
        assert report is not None and report.loss is None and report.metrics == {"ok": 1.0}
    assert logged.remarks == [
        "shoal.log: loss is not finite, first at step 3, and is left out there.",
        "shoal.log: acc is not finite, first at step 3, and is left out there.",
    ]


def test_a_name_that_cannot_be_a_metrics_is_said_with_one_that_can(logged: Logged) -> None:
    report = logged(1, metrics={"top 5": 1.0})
    assert report is not None and report.metrics == {}
    assert "'top 5' cannot name a metric" in logged.remarks[0] and "for example 'top_5'" in logged.remarks[0]


def test_a_job_has_16_metrics_at_most(logged: Logged) -> None:
    report = logged(1, metrics={f"m{number}": number for number in range(17)})
    assert report is not None and len(report.metrics) == 16
    assert logged.remarks == ["shoal.log: m16 is left out, because a job has at most 16 metrics."]
    later = logged(2, metrics={"m3": 1.0, "m17": 1.0})
    assert later is not None and later.metrics == {"m3": 1.0}


def test_an_evaluation_that_is_logged_after_its_step_is_the_steps_validation(logged: Logged) -> None:
    assert isinstance(logged(5, loss=1.0), StepReport)
    found = logged(5, metrics={"eval_loss": 0.5, "eval_accuracy": 0.25})
    assert isinstance(found, ValidationReport)
    assert (found.step, found.loss, found.metrics) == (5, 0.5, {"eval_accuracy": 0.25})


def test_other_values_that_are_logged_after_their_step_come_with_the_next(logged: Logged) -> None:
    assert logged(5) is not None and logged(5, metrics={"accuracy": 0.5}) is None
    following = logged(6, metrics={"reward": 2.0})
    assert following is not None and following.metrics == {"accuracy": 0.5, "reward": 2.0}


def test_what_is_said_names_where_the_values_are_from() -> None:
    remarks: list[str] = []
    steps = LoggedSteps(ASSIGNMENT, 100.0, remarks.append)
    assert steps.report_of({"step": 1, "at": 101.0, "loss": float("nan")}, "TensorBoard") is not None
    assert remarks == ["TensorBoard: loss is not finite, first at step 1, and is left out there."]
