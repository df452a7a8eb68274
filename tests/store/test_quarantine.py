"""A stored row that today's rules refuse is quarantined: it shows why, and the other jobs go on."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update

from shoal_service.core.desired import Desired
from shoal_service.store import (
    Lease,
    RequestConflict,
    Store,
    driving,
    histories,
    job_lists,
    metrics_snapshot,
    submissions,
)
from shoal_service.store.database import job_specs, jobs
from shoal_service.views import JobPatch
from shoal_workers.contract.job import JobState

Submit = Callable[..., str]


def change_spec(store: Store, job_id: str, change: Callable[[str], str]) -> None:
    with store._database.write() as tx:
        num = tx.execute(select(jobs.c.num).where(jobs.c.id == job_id)).scalar_one()
        before = tx.execute(select(job_specs.c.document).where(job_specs.c.job_num == num)).scalar_one()
        tx.execute(update(job_specs).where(job_specs.c.job_num == num).values(document=change(before)))


def change_status(store: Store, job_id: str, document: str) -> None:
    with store._database.write() as tx:
        tx.execute(update(jobs).where(jobs.c.id == job_id).values(status=document))


def with_unknown_key(document: str) -> str:
    return json.dumps({**json.loads(document), "shards": 3})


DAMAGES: dict[str, Callable[[str], str]] = {
    "a key that this release does not know": with_unknown_key,
    "a value out of bounds": lambda document: json.dumps({**json.loads(document), "stop": {"steps": -1}}),
    "half a document": lambda document: document[: len(document) // 2],
    "no object": lambda document: "[]",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_spec_that_cannot_be_read_blocks_no_other_job_and_the_job_shows_why(
    store: Store, lease: Lease, submit: Submit, damage: Callable[[str], str]
) -> None:
    bad, good = submit(), submit()
    change_spec(store, bad, damage)
    unreadable: dict[str, str] = {}
    assert [row.id for row in store.reading(driving.to_drive)(unreadable=unreadable)] == [good]
    assert list(unreadable) == [bad]
    store.writing(driving.quarantine, lease.epoch)(unreadable, now=7.0)
    job = store.get_job(bad)
    assert job.status.reason == "quarantined"
    assert job.status.message.startswith("This release cannot read the job's stored spec")
    [event] = [event for event in store.reading(histories.read_events)(bad) if event.type == "job.quarantined"]
    assert event.data["message"] == unreadable[bad]
    assert {summary.reason for summary in store.reading(job_lists.page)().items if summary.id == bad} == {"quarantined"}
    with pytest.raises(RequestConflict, match="cannot be changed"):
        store.writing(submissions.patch)(bad, JobPatch(priority=3), if_match=None, now=8.0)
    assert store.get_job(good).status.reason == ""


def test_a_quarantine_is_one_event_and_ends_when_the_row_can_be_read_again(
    store: Store, lease: Lease, job_id: str
) -> None:
    change_spec(store, job_id, with_unknown_key)
    for now in (7.0, 8.0):
        unreadable: dict[str, str] = {}
        store.reading(driving.to_drive)(unreadable=unreadable)
        store.writing(driving.quarantine, lease.epoch)(unreadable, now=now)
    change_spec(
        store, job_id, lambda document: json.dumps({k: v for k, v in json.loads(document).items() if k != "shards"})
    )
    unreadable = {}
    assert [row.id for row in store.reading(driving.to_drive)(unreadable=unreadable)] == [job_id] and unreadable == {}
    types = [event.type for event in store.reading(histories.read_events)(job_id)]
    assert types.count("job.quarantined") == 1
    store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=1, now=9.0)
    assert store.get_job(job_id).status.reason == ""


def test_a_quarantined_job_in_the_queue_can_be_cancelled(store: Store, lease: Lease, job_id: str) -> None:
    change_spec(store, job_id, with_unknown_key)
    unreadable: dict[str, str] = {}
    store.reading(driving.to_drive)(unreadable=unreadable)
    store.writing(driving.quarantine, lease.epoch)(unreadable, now=7.0)
    store.writing(submissions.request)(job_id, Desired.CANCEL, now=8.0)
    assert store.get_job(job_id).status.state is JobState.CANCELLED


@pytest.mark.parametrize("document", ['{"step": "many", "message": "m"}', "{", "[]", '{"goodput": 3}'])
def test_a_status_that_cannot_be_read_is_repaired_and_blocks_no_other_job(
    store: Store, lease: Lease, submit: Submit, begin: Callable[..., Any], document: str
) -> None:
    job_id, good = submit(), submit()
    attempt = begin(job_id)
    change_status(store, job_id, document)
    assert {row.id for row in store.reading(driving.to_drive)()} == {job_id, good}, (
        "what cannot be read of it is measured again"
    )
    assert store.get_job(job_id).status.state is JobState.STARTING
    assert {summary.id for summary in store.reading(job_lists.page)().items} == {job_id, good}
    assert [
        live.job_id for live in store.reading(metrics_snapshot.read)(metrics_snapshot.LiveJobs(), now=3.0).live
    ] == [job_id]
    attempt.report(status_step=3)
    assert store.get_job(job_id).status.step == 3
