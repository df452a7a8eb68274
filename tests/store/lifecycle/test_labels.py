"""Labels that are changed are those by which the job is found, and nothing else of it changes, on both databases."""

from collections.abc import Callable

import pytest

from shoal_service.core.desired import Desired
from shoal_service.core.selection import LabelSelector
from shoal_service.store import Store, histories, job_deletion, job_lists, submissions
from shoal_service.store.errors import RequestConflict
from shoal_service.store.job_deletion import DeletionRequest
from shoal_service.store.job_lists import FleetQuery
from shoal_service.store.submissions import merged_labels
from shoal_service.views import JobPatch

Submit = Callable[..., str]


def test_null_removes_and_what_is_not_named_stays() -> None:
    before = {"a": "1", "b": "2"}
    assert merged_labels(before, {"b": None, "c": "3", "d": None}) == {"a": "1", "c": "3"}
    assert before == {"a": "1", "b": "2"}


def test_a_job_is_found_by_its_new_labels_only(store: Store, submit: Submit) -> None:
    job_id, other = submit(labels={"a": "1", "b": "2"}), submit(labels={"a": "1"})
    store.writing(submissions.patch)(job_id, JobPatch(labels={"a": "9", "b": None, "c": "3"}), if_match=None, now=5.0)

    def found(text: str) -> set[str]:
        return {job.id for job in store.reading(job_lists.page)(FleetQuery(labels=(LabelSelector.parse(text),))).items}

    assert [found(text) for text in ("a=1", "a=9", "b", "c=3")] == [{other}, {job_id}, set(), {job_id}]
    assert store.get_job(job_id).spec.labels == {"a": "9", "c": "3"}


def test_the_same_labels_again_are_no_change(store: Store, submit: Submit) -> None:
    job_id = submit(labels={"a": "1"})
    again = store.writing(submissions.patch)(job_id, JobPatch(labels={"a": "1", "b": None}), if_match=None, now=5.0)
    assert (again.spec_version, len(store.reading(histories.read_events)(job_id))) == (1, 1)


def test_an_ended_job_keeps_its_end(store: Store, submit: Submit) -> None:
    job_id = submit()
    ended = store.writing(submissions.request)(job_id, Desired.CANCEL, now=2.0)
    labelled = store.writing(submissions.patch)(job_id, JobPatch(labels={"a": "1"}), if_match=None, now=5.0)
    assert (labelled.status, labelled.ended_at) == (ended.status, 2.0)
    assert (labelled.spec.labels, labelled.spec_version) == ({"a": "1"}, 2)


def test_a_job_that_is_being_deleted_cannot_be_labelled(store: Store, submit: Submit) -> None:
    job_id = submit()
    store.writing(submissions.request)(job_id, Desired.CANCEL, now=2.0)
    store.writing(job_deletion.begin)(job_id, DeletionRequest(root="/data/job", by="ada"), now=3.0)
    with pytest.raises(RequestConflict, match="it is being deleted"):
        store.writing(submissions.patch)(job_id, JobPatch(labels={"a": "1"}), if_match=None, now=5.0)
