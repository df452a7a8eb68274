"""Alerts of a job: its history tells once when a condition over its metrics begins to hold, and webhooks follow."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.control.submission import check_spec, patch
from shoal_service.core.alerts import PAUSE_S
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.webhooks import UNRESTRICTED
from shoal_service.store import Store, histories
from shoal_service.views import JobPatch
from shoal_workers.contract.checks.places import EVERYWHERE
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.job import EndReason, JobState

Submit = Callable[..., str]
Begin = Callable[..., Any]
NAN = math.nan


def steps(first: int, losses: list[float], **columns: list[Any]) -> tuple[SeriesPoint, ...]:
    rest = {"grad_norm": 1.0, "lr": 1.0, "tokens_per_s": 1.0, "step_s": 1.0, "world_size": 1, "generation": 1}
    rows = [{name: values[row] for name, values in columns.items()} for row in range(len(losses))]
    return tuple(
        SeriesPoint(step=first + row, **{"at": float(first + row), **rest, "loss": losses[row], **rows[row]})
        for row in range(len(losses))
    )


def raised(store: Store, job_id: str) -> list[tuple[str, int]]:
    events = store.reading(histories.read_events)(job_id)
    return [(event.data["condition"], event.data["step"]) for event in events if event.type == "alert.raised"]


def test_each_crossing_is_told_once_also_of_a_spike_within_a_report(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(alerts=["loss > 10", "max(grad_norm) > 100", "val.acc < 0.5 and step >= 3"])
    attempt = begin(job_id)
    attempt.report(series=steps(1, [4.0, 3.0], val_metrics=[{"acc": 0.1}, {}]))
    assert raised(store, job_id) == []
    attempt.report(series=steps(3, [12.0, 13.0, 5.0], grad_norm=[1.0, 900.0, 1.0]))
    expected = [("loss > 10", 3), ("max(grad_norm) > 100", 4), ("val.acc < 0.5 and step >= 3", 3)]
    assert raised(store, job_id) == expected
    attempt.repeat(series=steps(3, [12.0, 13.0, 5.0], grad_norm=[1.0, 900.0, 1.0]))
    attempt.report(series=steps(6, [11.0, NAN, 12.0]))  # again, too soon to be told
    assert raised(store, job_id) == expected
    late = 8.0 + PAUSE_S
    attempt.report(series=steps(9, [1.0, 20.0, 20.0], at=[late, late, late]))
    assert raised(store, job_id) == [*expected, ("loss > 10", 10)]
    loss, norm, acc = store.get_job(job_id).status.alerts
    assert (loss.holds, loss.step, norm.holds, norm.step, acc.holds) == (True, 10, True, 4, True)
    [event] = [one for one in store.reading(histories.read_events)(job_id) if one.data.get("step") == 4]
    assert event.message == "alert: max(grad_norm) > 100 since step 4 (max(grad_norm) 900)"


def test_a_loss_that_is_not_finite_is_told_also_if_the_job_stops_there(
    store: Store, submit: Submit, begin: Begin
) -> None:
    condition = "first(step where loss is nan)"
    goes_on, stops = (submit(alerts=[condition], retry={"max_failures": 0}) for _ in range(2))
    begin(goes_on).report(series=steps(1, [NAN, 2.0, NAN, NAN]))
    attempt = begin(stops)
    attempt.report(series=steps(1, [2.0, 2.0]), status_step=2)
    attempt.report(status_step=2, end=AttemptEnd(reason=EndReason.NON_FINITE, message="step 3", step=2))
    assert store.get_job(stops).status.state is JobState.FAILED
    assert (raised(store, goes_on), raised(store, stops)) == ([(condition, 3)], [(condition, 3)])


def test_alerts_are_changed_while_the_job_trains(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(alerts=["loss > 10"])
    attempt = begin(job_id)
    attempt.report(series=steps(1, [20.0]))
    changed = patch(store, job_id, JobPatch(alerts=("loss > 10", "loss > 30")), if_match=None, now=5.0)
    assert changed.spec.alerts == ("loss > 10", "loss > 30")
    attempt.report(series=steps(2, [40.0]))
    assert raised(store, job_id) == [("loss > 10", 1), ("loss > 30", 2)]
    patch(store, job_id, JobPatch(alerts=()), if_match=None, now=6.0)
    assert store.get_job(job_id).status.alerts == ()
    with pytest.raises(SpecError, match=r"alerts\.0"):
        patch(store, job_id, JobPatch(alerts=("loss >",)), if_match=None, now=6.0)


@pytest.mark.parametrize(
    "condition", ["loss >", "state == 'FAILED'", "optimizer.lr > 1", "los > 1", " ", "goodput < 1"]
)
def test_what_is_no_condition_over_metrics_is_refused(condition: str) -> None:
    spec = parse_spec({"task": "m:T", "stop": {"steps": 1}, "alerts": ["loss > 1", condition]})
    with pytest.raises(SpecError) as error:
        check_spec(spec, EVERYWHERE, UNRESTRICTED)
    assert [problem.path for problem in error.value.problems] == ["alerts.1"]
