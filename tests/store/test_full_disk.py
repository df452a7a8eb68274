"""What is shown of a job while nothing can be stored says so: its step is not the newest."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from kit.databases import MigratedDatabases
from shoal_service.reports import PendingLog, SupervisorReports
from shoal_service.store import Store, StoreUnavailable, driving, histories, submissions
from shoal_service.store.reporting import apply
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState
from shoal_workers.contract.messages import LogStream


def test_a_job_says_that_its_step_is_old_while_the_disk_is_full(tmp_path: Path, migrated: MigratedDatabases) -> None:
    store = Store.open(migrated.sqlite(tmp_path / "shoal.db"))
    lease = store.acquire_lease("me", ttl_s=1e9, now=0.0)
    assert lease is not None
    spec = parse_spec({"stop": {"steps": 9}, "data": {"corpus": "python-stdlib"}})
    job_id = store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)[0].id
    store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=1, now=2.0)

    def report(number: int, line: str) -> None:
        log = PendingLog(at=1.0, rank=0, worker_id="w", stream=LogStream.STDOUT, text=line)
        status = JobStatus(state=JobState.RUNNING, attempt=1, generation=1, step=number)
        reports = SupervisorReports(attempt=1, seq=number, status=status, logs=(log,) * 500)
        store.writing(apply, lease.epoch)(job_id, reports, now=3.0)

    report(1, "short")
    assert store.get_job(job_id).status.note == ""
    with store.write() as tx:
        pages = tx.execute(text("PRAGMA page_count")).scalar_one()
        tx.execute(text(f"PRAGMA max_page_count = {pages}"))
    with pytest.raises(StoreUnavailable, match="full"):
        report(2, "x" * 4_000)
    for status in (store.get_job(job_id).status, store.reading(histories.read_overview)(job_id).job.status):
        assert status.step == 1 and status.note.startswith("Nothing has been stored for ")
        assert status.note.endswith("database or disk is full. The job may be further than is shown here.")
    with store.write() as tx:
        tx.execute(text("PRAGMA max_page_count = 1000000"))
    report(2, "x" * 4_000)
    status = store.get_job(job_id).status
    assert (status.step, status.note) == (2, "")
    store.close()
