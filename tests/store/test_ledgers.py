from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.goodput import Goodput
from shoal_service.store import Lease, Store, driving, submissions
from shoal_service.views import ElasticityPatch, JobPatch
from shoal_workers.contract.job import EndReason, IncidentCause, JobState

Submit = Callable[..., str]
Begin = Callable[..., Any]


def seconds(store: Store, job_id: str) -> dict[str, float]:
    shown = store.get_job(job_id).status.goodput
    assert shown is not None
    assert shown.total == pytest.approx(sum(shown.seconds.values()))
    return {name: amount for name, amount in shown.seconds.items() if amount}


def ledger(at: float, max_step: int = 0, **amounts: float) -> Goodput:
    return Goodput(at=at, max_step=max_step, seconds=amounts, total=sum(amounts.values()))


def test_the_time_in_the_queue_is_booked_for_every_desired_worker(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(now=1.0, elasticity={"max_workers": 4})
    begin(job_id)  # at 5
    assert seconds(store, job_id) == {"queued": 16.0}


def test_a_change_of_the_desired_workers_counts_from_its_time_on(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(now=1.0, elasticity={"max_workers": 4})
    patch = JobPatch(elasticity=ElasticityPatch(max_workers=2))
    store.writing(submissions.patch)(job_id, patch, if_match=None, now=2.0)
    begin(job_id)
    assert seconds(store, job_id) == {"queued": 4.0 + 6.0}


def test_a_supervisor_continues_the_ledger_and_its_end_closes_it(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(now=1.0, elasticity={"max_workers": 2})
    attempt = begin(job_id)
    attempt.report(status_goodput=ledger(9.0, queued=8.0, starting=2.0, productive=6.0))
    assert seconds(store, job_id) == {"queued": 8.0, "starting": 2.0, "productive": 6.0}
    last = ledger(12.0, queued=8.0, starting=2.0, productive=12.0)
    attempt.report(status_goodput=last, end=AttemptEnd(reason=EndReason.FINISHED, message="", step=9), now=12.5)
    assert seconds(store, job_id) == {"queued": 8.0, "starting": 2.0, "productive": 12.0, "idle": 1.0}
    job = store.get_job(job_id)
    assert job.ended_at is not None and job.status.goodput is not None
    assert job.status.goodput.total == (job.ended_at - job.created_at) * 2


def test_an_old_report_does_not_reset_the_ledger(store: Store, submit: Submit, begin: Begin) -> None:
    attempt = begin(submit())
    attempt.report(status_goodput=ledger(9.0, productive=6.0))
    attempt.repeat(status_goodput=ledger(8.0, productive=5.0))
    attempt.report()
    assert seconds(store, attempt.job_id) == {"productive": 6.0}


def test_a_lost_attempt_keeps_its_reported_seconds_and_the_rest_is_the_loss_of_the_cluster(
    store: Store, submit: Submit, begin: Begin, lease: Lease
) -> None:
    attempt = begin(submit(now=1.0))
    reported = ledger(9.0, max_step=7, queued=4.0, productive=5.0)
    attempt.report(status_goodput=reported.model_copy(update={"unsettled": 1.0}))  # of a step that is not completed
    lost = {"reason": EndReason.SUPERVISOR_LOST, "message": ""}
    store.writing(driving.requeue, lease.epoch)(attempt.job_id, now=11.0, **lost)
    assert seconds(store, attempt.job_id) == {"queued": 4.0, "productive": 4.0, "recovering": 3.0}
    store.writing(driving.begin_attempt, lease.epoch)(attempt.job_id, workers=1, now=14.0)
    assert seconds(store, attempt.job_id) == {"queued": 7.0, "productive": 4.0, "recovering": 3.0}
    store.writing(driving.requeue, lease.epoch)(attempt.job_id, now=15.0, **lost)
    assert seconds(store, attempt.job_id) == {"queued": 7.0, "productive": 4.0, "recovering": 4.0}
    shown = store.get_job(attempt.job_id).status.goodput
    assert shown is not None and shown.max_step == 7
    assert shown.recovering == {IncidentCause.CLUSTER_LOST: 4.0}


def test_a_paused_job_has_no_desired_workers(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(now=1.0)
    store.writing(submissions.request)(job_id, Desired.PAUSE, now=2.0)
    store.writing(submissions.request)(job_id, Desired.RUN, now=102.0)
    store.writing(submissions.request)(job_id, Desired.CANCEL, now=105.0)
    assert seconds(store, job_id) == {"queued": 4.0}
    assert store.get_job(job_id).status.state is JobState.CANCELLED
