"""Pruning in the store: what is compared, who is ended, and what a user reads; on both databases."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kit.store_calls import replace_call
from kit.views import series_point
from shoal_service.control.submission import Pruner
from shoal_service.core.desired import Desired
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.sweeps import Measure, Rule
from shoal_service.store import Lease, Store, driving, histories, submissions, sweep_jobs
from shoal_workers.contract.job import EndReason, JobState

Submit = Callable[..., str]
VALIDATED = {"every_steps": 4}
SWEEP = {"name": "lr", "prune": "median", "warmup_steps": 8}


def point(step: int, loss: float, val_loss: float | None = None) -> SeriesPoint:
    return series_point(step, loss=loss, lr=1e-3, tokens_per_s=10.0, step_s=0.1, world_size=1, val_loss=val_loss)


def curve(last: int, loss: float, *, validated: bool = True) -> tuple[SeriesPoint, ...]:
    return tuple(point(n, loss, loss if validated and n % 4 == 0 else None) for n in range(1, last + 1))


def prune(store: Store, lease: Lease, mono: float = 0.0, pruner: Pruner | None = None) -> None:
    (pruner or Pruner(store)).prune(store.reading(driving.to_drive)(max_queued=10), mono, epoch=lease.epoch, now=20.0)


def test_a_job_that_is_worse_than_the_median_is_ended_and_says_why(
    store: Store, submit: Submit, begin: Callable[..., Any], lease: Lease
) -> None:
    ids = [submit(validation=VALIDATED, sweep=SWEEP) for _ in range(4)]
    attempts = [begin(job_id) for job_id in ids]
    for attempt, loss in zip(attempts, (1.0, 2.0, 3.0, 4.0), strict=True):
        attempt.report(status_step=12, series=curve(12, loss))
    bystander = submit(validation=VALIDATED, sweep=SWEEP, project="other")
    begin(bystander).report(status_step=12, series=curve(12, 9.0))
    prune(store, lease)

    states = [store.get_job(job_id).status.state for job_id in ids]
    assert states == [JobState.RUNNING, JobState.RUNNING, JobState.CANCELLING, JobState.CANCELLING]
    assert store.get_job(bystander).status.state is JobState.RUNNING, "the sweep of another project"
    words = "pruned from sweep lr: its validation loss at step 12 is 4, worse than 2, the median of 3 other jobs"
    assert store.get_job(ids[3]).status.message == words
    attempts[3].report(JobState.CANCELLING, end=AttemptEnd(reason=EndReason.CANCELLED, message="", step=12))
    ended = store.get_job(ids[3]).status
    assert (ended.state, ended.reason, ended.message) == (JobState.CANCELLED, "pruned", words)
    assert [event.type for event in store.reading(histories.read_events)(ids[3])].count("job.outperformed") == 1


def test_a_training_loss_is_compared_as_a_mean_where_nothing_is_validated_under_way(
    store: Store, submit: Submit, begin: Callable[..., Any], lease: Lease
) -> None:
    ids = [submit(sweep=SWEEP) for _ in range(3)]
    for job_id, loss in zip(ids, (1.0, 1.0, float("nan")), strict=True):
        begin(job_id).report(status_step=17, series=curve(17, loss, validated=False))
    rules = {job_id: Rule(Measure.TRAINING, 8, 8) for job_id in ids}
    [(worst, worse)] = store.reading(sweep_jobs.find_worse)("default", "lr", rules).items()
    assert (worst, worse.step, worse.median, worse.num_others) == (ids[2], 16, 1.0, 2)
    prune(store, lease)
    assert "is not a number, worse than 1," in store.get_job(ids[2]).status.message


def test_before_the_warm_up_without_the_rule_and_after_a_request_nothing_is_ended(
    store: Store, submit: Submit, begin: Callable[..., Any], lease: Lease
) -> None:
    late = submit(validation=VALIDATED, sweep={**SWEEP, "warmup_steps": 100})
    keeps = submit(validation=VALIDATED, sweep={"name": "lr"})
    paused = submit(validation=VALIDATED, sweep=SWEEP)
    for job_id, loss in ((late, 9.0), (keeps, 8.0), (paused, 7.0)):
        begin(job_id).report(status_step=12, series=curve(12, loss))
    for loss in (1.0, 2.0):
        begin(submit(validation=VALIDATED, sweep=SWEEP)).report(status_step=12, series=curve(12, loss))
    store.writing(submissions.request)(paused, Desired.PAUSE, now=11.0)
    prune(store, lease)
    states = [store.get_job(job_id).status.state for job_id in (late, keeps, paused)]
    assert states == [JobState.RUNNING, JobState.RUNNING, JobState.PAUSING]


def test_a_cancel_after_a_retry_is_the_users(store: Store, submit: Submit, begin: Callable[..., Any]) -> None:
    job_id = submit(sweep=SWEEP)
    attempt = begin(job_id)
    attempt.report()
    store.writing(submissions.request)(job_id, Desired.CANCEL, now=11.0)
    end = AttemptEnd(reason=EndReason.CANCELLED, message="", step=0)
    attempt.report(JobState.CANCELLING, end=end)
    assert store.get_job(job_id).status.reason == "cancelled"


def test_nothing_is_read_until_a_job_has_trained_on(
    store: Store, submit: Submit, begin: Callable[..., Any], lease: Lease
) -> None:
    job_id = submit(sweep=SWEEP)
    begin(job_id).report(status_step=12)
    pruner, asked = Pruner(store), []
    replace_call(store, sweep_jobs.find_worse, lambda *given: asked.append(given) or {})
    for mono in (0.0, 10.0, 20.0):
        prune(store, lease, mono, pruner)
    assert len(asked) == 1
    [row] = store.reading(driving.to_drive)(max_queued=10)
    for step, mono in ((13, 22.5), (14, 23.0)):
        trained = replace(row, status=row.status.model_copy(update={"step": step}))
        pruner.prune([trained], mono, epoch=lease.epoch, now=20.0)
    assert len(asked) == 2, "at most every two seconds"


def test_halving_ends_what_does_not_pass_a_rung_and_again_as_others_arrive(
    store: Store, submit: Submit, begin: Callable[..., Any], lease: Lease
) -> None:
    rules = {"name": "asha", "prune": "halving", "warmup_steps": 8, "reduction": 2}
    ids = [submit(validation=VALIDATED, sweep=rules) for _ in range(4)]
    attempts = [begin(job_id) for job_id in ids]
    attempts[0].report(status_step=8, series=curve(8, 3.0))
    prune(store, lease)
    assert store.get_job(ids[0]).status.state is JobState.RUNNING, "it is alone at the rung"
    attempts[1].report(status_step=8, series=curve(8, 2.0))
    prune(store, lease)
    words = "pruned from sweep asha: its validation loss at step 8 is 3, and 1 of 2 jobs pass this rung, with 2 or less"
    assert store.get_job(ids[0]).status.message == words
    attempts[1].report(status_step=16, series=tuple(point(n, 2.0, 2.0) for n in range(9, 17)))
    for attempt, loss in zip(attempts[2:], (1.0, 0.5), strict=True):
        attempt.report(status_step=8, series=curve(8, loss))
    prune(store, lease, pruner=Pruner(store))  # that of a control plane that was started again
    states = [store.get_job(job_id).status.state for job_id in ids]
    assert states == [JobState.CANCELLING, JobState.RUNNING, JobState.RUNNING, JobState.RUNNING]
    for attempt, loss in zip(attempts[2:], (1.0, 0.5), strict=True):
        attempt.report(status_step=16, series=tuple(point(n, loss, loss) for n in range(9, 17)))
    prune(store, lease)
    assert store.get_job(ids[1]).status.state is JobState.CANCELLING, "the third and the fourth have reached its rung"
    assert store.get_job(ids[3]).status.state is JobState.RUNNING
    assert store.reading(sweep_jobs.read_sweep)("default", "asha").reduction == 2


def test_the_curves_of_a_sweep_are_read_with_the_best_so_far(
    store: Store, submit: Submit, begin: Callable[..., Any]
) -> None:
    ids = [submit(sweep={"name": "seen"}) for _ in range(5)]
    for n, job_id in enumerate(ids[:4]):
        begin(job_id).report(status_step=12, series=curve(12, 1.0 + n % 2))
    read = store.reading(sweep_jobs.read_curves)
    curves = read("default", "seen", "loss")
    assert [curve.id for curve in curves.jobs] == ids and curves.steps_per_point == 1
    assert [len(curve.step) for curve in curves.jobs] == [12, 12, 12, 12, 0]
    assert [(best.value, best.job) for best in curves.best] == [(1.0, min(ids[0], ids[2]))]
    validated = read("default", "seen", "val_loss")
    assert validated.jobs[0].step == (4, 8, 12) and validated.jobs[1].value == (2.0, 2.0, 2.0)


def test_long_curves_of_a_sweep_are_read_as_means(store: Store, submit: Submit, begin: Callable[..., Any]) -> None:
    job = submit(sweep={"name": "long"})
    attempt = begin(job)
    for first in range(1, 1_001, 250):
        attempt.report(status_step=first + 249, series=tuple(point(n, float(n)) for n in range(first, first + 250)))
    curves = store.reading(sweep_jobs.read_curves)("default", "long", "loss")
    assert curves.steps_per_point == 8 and len(curves.jobs[0].step) == 125
    assert curves.jobs[0].value[0] == 4.5
