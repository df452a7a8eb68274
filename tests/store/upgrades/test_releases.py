"""The database of each release before is opened by this one, on SQLite and PostgreSQL: its jobs are read and go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import golden_database
from shoal_service.store import Store, checkpoint_rows, driving, histories, job_lists
from shoal_service.store.database import Database
from shoal_service.store.migrate import migrate
from shoal_workers.contract.job import IncidentCause, JobState

DOCUMENTS = sorted(golden_database.FOLDER.glob("database-*.json"))


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return document


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.stem)
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return _read(request.param)


@pytest.fixture
def upgraded(document: dict[str, Any], empty_url: str) -> Iterator[Store]:
    """The database of an older release, after its first start with this one."""
    database = Database(empty_url)
    migrate(database, document["schema"])
    with database.write() as tx:
        golden_database.load(tx.connection, document)
    database.close()
    store = Store.open(empty_url)
    yield store
    store.close()


def test_jobs_of_an_older_release_are_read_whole(upgraded: Store, document: dict[str, Any]) -> None:
    rows = {row["id"]: row for row in document["tables"]["jobs"]}
    jobs = {job.id: upgraded.get_job(job.id) for job in upgraded.reading(job_lists.page)(limit=100).items}
    assert jobs.keys() == rows.keys()
    for job_id, job in jobs.items():
        row = rows[job_id]
        events = [event for event in document["tables"]["events"] if event["job_num"] == row["num"]]
        checkpoints = [one for one in document["tables"]["checkpoints"] if one["job_num"] == row["num"]]
        assert (job.name, job.status.state, job.spec.name) == (row["name"], row["state"], row["name"])
        assert [event.type for event in upgraded.reading(histories.read_events)(job_id)] == [
            event["type"] for event in events
        ]
        assert len(upgraded.reading(checkpoint_rows.read_checkpoints)(job_id)) == len(checkpoints)
    assert {JobState.QUEUED, JobState.SUCCEEDED} <= {job.status.state for job in jobs.values()}
    causes = [incident.cause for job_id in jobs for incident in upgraded.reading(histories.read_incidents)(job_id)]
    assert causes == [IncidentCause.WORKER_DIED]


def test_a_job_that_waited_in_an_older_release_is_started(upgraded: Store) -> None:
    lease = upgraded.acquire_lease("the next release", ttl_s=10.0, now=4e9)
    assert lease is not None
    [waiting, *_] = [job for job in upgraded.reading(job_lists.page)(limit=100).items if job.state is JobState.QUEUED]
    assert upgraded.writing(driving.begin_attempt, lease.epoch)(waiting.id, workers=1, now=4e9) == 1
    assert upgraded.get_job(waiting.id).status.state is JobState.STARTING


def test_the_documents_hold_nothing_of_the_machine_that_wrote_them(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    assert "/tmp/" not in text and "/home/" not in text
