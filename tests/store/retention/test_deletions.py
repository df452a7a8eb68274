"""A job is deleted in steps that can be repeated, on SQLite and PostgreSQL; other jobs keep every row."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import func, select

from shoal_service.core.desired import Desired
from shoal_service.core.retention import Kind
from shoal_service.store import Store, checkpoint_rows, job_deletion, submissions
from shoal_service.store.errors import JobNotEnded, JobNotFound, RequestConflict
from shoal_service.store.job_deletion import DeletionRequest
from shoal_service.store.tables import metadata
from shoal_workers.contract.job import JobState
from shoal_workers.contract.marker import CheckpointName

REQUEST = DeletionRequest(root="/data/job", by="somebody")


def _counts(store: Store) -> dict[str, int]:
    with store._database.read() as tx:
        return {
            table.name: tx.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
            if "job_num" in table.c or table.name == "jobs"
        }


def test_a_job_is_deleted_with_every_row_and_others_keep_theirs(store: Store, ended: Callable[..., str]) -> None:
    other = ended()
    before = _counts(store)
    job_id = ended()
    view = store.writing(job_deletion.begin)(job_id, REQUEST, now=200.0)
    assert (view.name, view.requested_by, view.finished_at, view.kept) == ("fish", "somebody", None, ())
    total = 0
    while removed := store.writing(job_deletion.remove_rows)(job_id):
        total += removed
    done = store.writing(job_deletion.finish)(job_id, now=201.0)
    assert done.finished_at == 201.0 and done.rows == total > 40
    assert _counts(store) == before
    with pytest.raises(JobNotFound):
        store.get_job(job_id)
    assert store.get_job(other).status.state is JobState.SUCCEEDED
    assert store.reading(job_deletion.newest)() == [done] and store.reading(job_deletion.unfinished)() == []


def test_a_deletion_is_done_in_bounded_steps_and_continued_after_a_crash(
    store: Store, ended: Callable[..., str]
) -> None:
    job_id = ended(20)
    store.writing(job_deletion.begin)(job_id, REQUEST, now=200.0)
    with store._database.write() as tx:
        assert job_deletion.remove_batch(tx, 1, Kind.JOB, limit=7) == 7
    assert [one.job_id for one in store.reading(job_deletion.unfinished)()] == [job_id], "found by whoever looks for it"
    assert store.writing(job_deletion.begin)(job_id, REQUEST, now=300.0).requested_at == 200.0, "the same deletion"
    while store.writing(job_deletion.remove_rows)(job_id):
        pass
    first = store.writing(job_deletion.finish)(job_id, now=301.0)
    assert store.writing(job_deletion.finish)(job_id, now=999.0) == first
    assert store.writing(job_deletion.remove_rows)(job_id) == 0
    assert store.writing(job_deletion.begin)(job_id, REQUEST, now=400.0) == first, "a repeated request finds it done"


def test_a_job_that_has_not_ended_is_refused_with_the_way_out(
    store: Store, submit: Callable[..., str], begin: Callable[..., Any]
) -> None:
    for job_id in (submit(), submit()):
        with pytest.raises(JobNotEnded, match=f"Cancel it first: `shoal cancel {job_id}`"):
            store.writing(job_deletion.begin)(job_id, REQUEST, now=200.0)
        assert store.reading(job_deletion.find)(job_id) is None
    begin(job_id)
    with pytest.raises(JobNotEnded, match="is STARTING"):
        store.writing(job_deletion.begin)(job_id, REQUEST, now=200.0)
    with pytest.raises(JobNotFound):
        store.writing(job_deletion.begin)("job-unknown", REQUEST, now=200.0)
    with pytest.raises(JobNotFound):
        store.writing(job_deletion.finish)("job-unknown", now=200.0)


def test_rows_of_a_job_that_is_not_being_deleted_are_never_removed(store: Store, ended: Callable[..., str]) -> None:
    job_id = ended()
    before = _counts(store)
    assert store.writing(job_deletion.remove_rows)(job_id) == 0
    assert _counts(store) == before


def test_a_job_that_is_being_deleted_can_neither_go_on_nor_be_pinned(store: Store, ended: Callable[..., str]) -> None:
    job_id = ended()
    name = CheckpointName(10, 1, 1)
    store.writing(checkpoint_rows.pin)(job_id, name, is_pinned=True, now=150.0)
    view = store.writing(job_deletion.begin)(job_id, REQUEST, now=200.0)
    assert view.kept == (f"/data/job/{name}",)
    with pytest.raises(RequestConflict, match="it is being deleted"):
        store.writing(checkpoint_rows.pin)(job_id, name, is_pinned=False, now=201.0)
    with pytest.raises(RequestConflict):
        store.writing(submissions.request)(job_id, Desired.RUN, now=201.0)


def test_the_error_of_a_deletion_is_kept_until_it_is_done(store: Store, ended: Callable[..., str]) -> None:
    job_id = ended()
    store.writing(job_deletion.begin)(job_id, REQUEST, now=200.0)
    assert store.writing(job_deletion.note_error)(job_id, "the storage is away").error == "the storage is away"
    assert [one.error for one in store.reading(job_deletion.newest)(project="default")] == ["the storage is away"]
    assert store.reading(job_deletion.newest)(project="another") == []
    assert store.writing(job_deletion.finish)(job_id, now=201.0).error == ""
