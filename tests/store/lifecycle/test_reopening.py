"""Jobs that go on in place, their labels and the versions of their code, on both databases."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.base import JobEvent
from shoal_service.core.events.job import CodeRefused, CodeRolledBack
from shoal_service.fleet_views import ProjectRules
from shoal_service.reports import PendingEvent
from shoal_service.store import Store, checkpoint_rows, driving, histories, job_deletion, queueing, submissions
from shoal_service.store.errors import LifecycleConflict, QueueFull, RequestConflict
from shoal_service.store.job_deletion import BEGINNING, DeletionRequest
from shoal_service.views import CheckpointState, CheckpointView, CodePatch, JobPatch, SchedulePatch, ValidationPatch
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.job import EndReason, JobState, UserFailure
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.spec import StopSpec, ValidationSpec
from shoal_workers.contract.validation import judge

Submit = Callable[..., str]
Begin = Callable[..., Any]
DONE = AttemptEnd(reason=EndReason.FINISHED, message="finished after 100 steps", step=100)
FAILURE = UserFailure(type="ValueError", message="no", traceback="...", phase="forward", ranks=(0,), step=40)
FAILED = AttemptEnd(reason=EndReason.USER_ERROR, message="no", step=40, failure=FAILURE)
LAST = CheckpointView(step=100, url="/c/x", state=CheckpointState.COMMITTED, attempt=1, generation=1)


def test_a_finished_job_goes_on_in_place(store: Store, begin: Begin, job_id: str) -> None:
    begin(job_id).report(checkpoints=(LAST,), status_checkpoint_step=100, end=DONE, now=50.0)
    job = store.writing(submissions.extend)(job_id, steps=150, now=90.0)

    assert (job.status.state, job.spec.stop, job.spec_version) == (JobState.QUEUED, StopSpec(steps=150), 2)
    assert job.ended_at is None and job.status.step == 100
    assert [event.type for event in store.reading(histories.read_events)(job_id)][-2:] == ["job.extended", "job.state"]
    assert job.status.goodput is not None and job.status.goodput.total == pytest.approx(49.0), "its rest costs nothing"
    assert begin(job_id).number == 2


def test_a_running_job_goes_on_without_leaving_its_state(store: Store, job_id: str, attempt: Any) -> None:
    attempt.report(status_step=70)
    job = store.writing(submissions.extend)(job_id, steps=150, now=20.0)
    assert (job.status.state, job.spec.stop.steps) == (JobState.RUNNING, 150)
    assert store.reading(driving.to_drive)()[0].spec.stop.steps == 150
    for steps, words in ((60, "70 done. Give more than 70"), (120, r"goes on to stop\.steps 150 already")):
        with pytest.raises(LifecycleConflict, match=words):
            store.writing(submissions.extend)(job_id, steps=steps, now=21.0)


def test_an_end_that_did_not_know_of_the_extension_is_not_the_jobs(
    store: Store, begin: Begin, job_id: str, attempt: Any
) -> None:
    attempt.report(status_observed_generation=1, status_step=99)
    store.writing(submissions.extend)(job_id, steps=150, now=20.0)
    attempt.report(status_observed_generation=1, status_step=100, checkpoints=(LAST,), end=DONE)
    assert store.get_job(job_id).status.state is JobState.QUEUED
    again = begin(job_id)
    again.report(status_observed_generation=2, end=DONE.model_copy(update={"step": 150}))
    assert store.get_job(job_id).status.state is JobState.SUCCEEDED


def test_an_end_that_did_not_know_of_another_change_stays(store: Store, job_id: str, attempt: Any) -> None:
    attempt.report(status_observed_generation=1)
    store.writing(submissions.patch)(job_id, JobPatch(priority=5), if_match=None, now=20.0)
    attempt.report(status_observed_generation=1, end=DONE)
    assert store.get_job(job_id).status.state is JobState.SUCCEEDED


def test_a_job_without_a_checkpoint_is_not_silently_begun_again(store: Store, begin: Begin, job_id: str) -> None:
    begin(job_id).report(end=DONE)
    with pytest.raises(LifecycleConflict, match="has no checkpoint any more, so its 100 steps would begin again"):
        store.writing(submissions.extend)(job_id, steps=150, now=90.0)


def test_a_failed_job_tries_again_with_its_whole_budget(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(retry={"max_failures": 0})
    begin(job_id).report(end=FAILED)
    assert store.get_job(job_id).status.state is JobState.FAILED
    job = store.writing(submissions.retry)(job_id, now=60.0)
    assert (job.status.state, job.status.failure) == (JobState.QUEUED, None)
    assert store.reading(histories.read_events)(job_id)[-2].message == "tried again after user_error at step 40"
    begin(job_id).report(end=FAILED)
    ended = store.get_job(job_id)
    assert ended.status.state is JobState.FAILED
    assert "Not retried: " in ended.status.message


def test_a_job_that_returns_counts_for_the_limits_of_the_queue(store: Store, submit: Submit, begin: Begin) -> None:
    store.writing(queueing.put_project)("default", ProjectRules(max_queued=1))
    job_id = submit(retry={"max_failures": 0})
    begin(job_id).report(end=FAILED)
    submit()
    with pytest.raises(QueueFull):
        store.writing(submissions.retry)(job_id, now=60.0)
    assert store.get_job(job_id).status.state is JobState.FAILED


def test_a_patch_changes_the_end_the_rate_and_validation(store: Store, submit: Submit) -> None:
    job_id = submit(schedule={"steps": 90})
    changes = JobPatch(
        stop=StopSpec(tokens=5000), schedule=SchedulePatch(steps=None), validation=ValidationPatch(every_steps=7)
    )
    job = store.writing(submissions.patch)(job_id, changes, if_match=None, now=5.0)
    assert (job.spec.stop, job.spec.schedule.steps) == (StopSpec(tokens=5000), None)
    assert (job.spec.schedule.name, job.spec.validation.every_steps) == ("cosine", 7)
    assert store.reading(histories.read_events)(job_id)[-1].data["schedule"] == {"steps": None}


def test_the_best_checkpoints_are_marked_and_kept_and_an_extended_job_has_its_patience_again(
    store: Store, submit: Submit, begin: Begin
) -> None:
    rule, standing = ValidationSpec(patience=1), None
    for step, loss in ((50, 2.0), (100, 3.0)):
        standing = judge(standing, rule, 1, step=step, loss=loss, metrics={})
    half = CheckpointView(step=50, url="/c/h", state=CheckpointState.COMMITTED, attempt=1, generation=1)
    job_id = submit()
    begin(job_id).report(checkpoints=(half, LAST), status_checkpoint_step=100, status_best=standing, end=DONE)
    assert [(one.step, one.best, one.score) for one in store.reading(checkpoint_rows.read_checkpoints)(job_id)] == [
        (50, 1, 2.0),
        (100, None, None),
    ]
    (ended,), _ = store.reading(job_deletion.find_ended_jobs)(before=1e9, after=BEGINNING, limit=10)
    assert ended.kept == {CheckpointName(50, 1, 1)}
    best = store.writing(submissions.extend)(job_id, steps=150, now=90.0).status.best
    assert best is not None and (best.num_since, best.best[0].value) == (0, 2.0)


def submit_script(store: Store) -> str:
    spec = parse_spec({"script": {"file": "train.py"}, "retry": {"max_failures": 2}})
    return store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)[0].id


def test_a_script_is_not_extended_and_says_why(store: Store, begin: Begin) -> None:
    job_id = submit_script(store)
    attempt = begin(job_id)
    words = "its script decides when it ends. Submit the script again with other arguments"
    with pytest.raises(LifecycleConflict, match=words):
        store.writing(submissions.extend)(job_id, steps=150, now=20.0)
    attempt.report(end=AttemptEnd(reason=EndReason.FINISHED, message="done", step=0))
    with pytest.raises(LifecycleConflict, match=words):
        store.writing(submissions.extend)(job_id, steps=150, now=90.0)
    with pytest.raises(LifecycleConflict, match="its script is done; submit it again"):
        store.writing(submissions.retry)(job_id, now=91.0)


def test_a_script_that_ran_for_long_is_tried_again(store: Store, begin: Begin) -> None:
    job_id = submit_script(store)
    failed = AttemptEnd(reason=EndReason.USER_ERROR, message="boom", step=0, failure=FAILURE, has_run_long=True)
    begin(job_id).report(end=failed)
    assert store.get_job(job_id).status.state is JobState.QUEUED
    begin(job_id).report(end=failed.model_copy(update={"has_run_long": False}))
    assert store.get_job(job_id).status.state is JobState.FAILED


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (JobPatch(stop=StopSpec(steps=5)), "stop"),
        (JobPatch(schedule=SchedulePatch(warmup_steps=5)), "schedule"),
        (JobPatch(validation=ValidationPatch(every_steps=5)), "validation"),
    ],
)
def test_what_only_a_task_has_cannot_be_changed_in_a_script(store: Store, changes: JobPatch, key: str) -> None:
    job_id = submit_script(store)
    with pytest.raises(SpecError, match=f"{key} says how Shoal trains a task, and script is set"):
        store.writing(submissions.patch)(job_id, changes, if_match=None, now=2.0)


def test_everything_else_of_a_script_can_be_changed(store: Store) -> None:
    job_id = submit_script(store)
    job = store.writing(submissions.patch)(job_id, JobPatch(priority=5), if_match=None, now=2.0)
    assert job.spec.priority == 5 and job.spec.script is not None and job.spec.script.file == "train.py"


def test_a_preempted_script_has_lost_nothing_that_is_known(store: Store, begin: Begin) -> None:
    job_id = submit_script(store)
    end = AttemptEnd(reason=EndReason.PREEMPTED, message="its script was asked to end.", step=40)
    begin(job_id).report(status_step=40, end=end)
    status = store.get_job(job_id).status
    assert (status.state, status.step, status.lost) == (JobState.QUEUED, 40, None)


def test_the_same_labels_again_are_no_change(store: Store, submit: Submit) -> None:
    job_id = submit(labels={"a": "1"})
    again = store.writing(submissions.patch)(job_id, JobPatch(labels={"a": "1", "b": None}), if_match=None, now=5.0)
    assert (again.spec_version, len(store.reading(histories.read_events)(job_id))) == (1, 1)


def test_an_ended_job_keeps_its_end(store: Store, job_id: str) -> None:
    ended = store.writing(submissions.request)(job_id, Desired.CANCEL, now=2.0)
    labelled = store.writing(submissions.patch)(job_id, JobPatch(labels={"a": "1"}), if_match=None, now=5.0)
    assert (labelled.status, labelled.ended_at) == (ended.status, 2.0)
    assert (labelled.spec.labels, labelled.spec_version) == ({"a": "1"}, 2)


def test_a_job_that_is_being_deleted_cannot_be_labelled(store: Store, job_id: str) -> None:
    store.writing(submissions.request)(job_id, Desired.CANCEL, now=2.0)
    store.writing(job_deletion.begin)(job_id, DeletionRequest(root="/data/job", by="ada"), now=3.0)
    with pytest.raises(RequestConflict, match="it is being deleted"):
        store.writing(submissions.patch)(job_id, JobPatch(labels={"a": "1"}), if_match=None, now=5.0)


OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64


def change(store: Store, job_id: str, version: str) -> None:
    store.writing(submissions.patch)(job_id, JobPatch(code=CodePatch(archive=version)), if_match=None, now=5.0)


def ended_by(event: JobEvent) -> tuple[PendingEvent, ...]:
    return (PendingEvent.of(event, 6.0),)


@pytest.mark.parametrize(
    "event",
    [
        CodeRefused(version=NEW, before=OLD, reason="another model"),
        CodeRolledBack(version=NEW, before=OLD, step=7, reason="it raised"),
    ],
)
def test_code_that_has_failed_is_not_that_of_the_next_attempt(
    store: Store, submit: Submit, begin: Begin, event: JobEvent
) -> None:
    job_id = submit(code={"archive": OLD, "env": {"A": "1"}})
    supervisor = begin(job_id)
    change(store, job_id, NEW)
    assert store.get_job(job_id).spec.code.archive == NEW
    supervisor.report(events=ended_by(event))
    job = store.get_job(job_id)
    assert (job.spec.code.archive, job.spec.code.env, job.spec_version) == (OLD, {"A": "1"}, 3)
    supervisor.repeat(events=ended_by(event))
    assert store.get_job(job_id).spec_version == 3


def test_a_version_that_was_requested_since_stays(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(code={"archive": OLD})
    supervisor = begin(job_id)
    change(store, job_id, NEW)
    change(store, job_id, OTHER)
    supervisor.report(events=ended_by(CodeRefused(version=NEW, before=OLD, reason="another model")))
    assert store.get_job(job_id).spec.code.archive == OTHER


def test_code_of_a_running_job_with_gpus_cannot_be_changed_and_of_a_queued_one_it_can(
    store: Store, submit: Submit, begin: Begin
) -> None:
    job_id = submit(code={"archive": OLD}, worker={"gpus": 1})
    change(store, job_id, NEW)
    begin(job_id)
    with pytest.raises(RequestConflict, match=r"hold GPUs\. Pause it, change the code, and resume it"):
        change(store, job_id, OTHER)
    assert store.get_job(job_id).spec.code.archive == NEW


def test_a_job_without_code_of_its_own_gets_none(store: Store, submit: Submit) -> None:
    with pytest.raises(RequestConflict, match="not from code of its own"):
        change(store, submit(), NEW)


def test_the_change_is_in_the_history_with_its_version(store: Store, submit: Submit) -> None:
    job_id = submit(code={"archive": OLD})
    change(store, job_id, NEW)
    [patched] = [event for event in store.reading(histories.read_events)(job_id) if event.type == "job.patched"]
    assert patched.data["code"] == {"archive": NEW} and patched.message == "spec changed to version 2: code"
