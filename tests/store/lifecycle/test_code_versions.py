"""The code of a job in its spec: changed on request, and taken back when the supervisor has, on both databases."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.events.base import JobEvent
from shoal_service.core.events.job import CodeRefused, CodeRolledBack
from shoal_service.reports import PendingEvent
from shoal_service.store import Store, histories, submissions
from shoal_service.store.errors import RequestConflict
from shoal_service.views import CodePatch, JobPatch

Submit = Callable[..., str]
Begin = Callable[..., Any]
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
