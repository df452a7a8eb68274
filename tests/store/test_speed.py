"""Generous limits, several times what was measured: they catch a lost index, not a slow machine.

What counts is the processor time of this process, so that other work on the machine does not fail a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from sqlalchemy import insert, select

from shoal_service.metrics import build_registry
from shoal_service.request_metrics import RequestMetrics
from shoal_service.store import Store
from shoal_service.store.database import Database
from shoal_service.store.tables import job_specs, jobs
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec

NUM_JOBS = 10_000


@pytest.fixture
def full_url(store_url: str, spec: JobSpec) -> str:
    """A database with 10,000 jobs, every hundredth of them failed and the rest queued."""
    store = Store.open(store_url)
    store.create_job(spec, idempotency_key=None, now=1.0)
    store.close()
    database = Database(store_url)
    with database.write() as tx:
        row = dict(tx.execute(select(jobs)).mappings().one())
        del row["num"]
        rows = [
            {**row, "id": f"job-{i}", "state": (JobState.FAILED if i % 100 == 0 else JobState.QUEUED).value}
            for i in range(1, NUM_JOBS)
        ]
        for start in range(0, len(rows), 1000):
            tx.execute(insert(jobs), rows[start : start + 1000])
        document = spec.model_dump_json()
        nums = tx.execute(select(jobs.c.num).where(jobs.c.id.like("job-%"), jobs.c.num > 1)).scalars().all()
        specs = [{"job_num": num, "version": 1, "accepted_at": 1.0, "document": document} for num in nums]
        tx.execute(insert(job_specs), specs)
    database.close()
    return store_url


def _cheapest_s(work: Callable[[], object], times: int = 5) -> float:
    best = float("inf")
    for _ in range(times):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def test_ten_thousand_jobs_are_listed_driven_and_scraped_quickly(full_url: str) -> None:
    store = Store.open(full_url)
    registry = build_registry(store, owner="o", requests=RequestMetrics())
    assert _cheapest_s(lambda: store.list_jobs(limit=50)) < 0.05
    assert _cheapest_s(lambda: store.list_jobs(limit=50, states=[JobState.FAILED, JobState.CANCELLED])) < 0.05
    page = store.list_jobs(limit=50)
    assert _cheapest_s(lambda: store.list_jobs(limit=50, cursor=page.next_cursor)) < 0.05
    assert _cheapest_s(store.jobs_to_drive) < 1.0
    assert _cheapest_s(lambda: generate_latest(registry)) < 0.5
    assert len(generate_latest(registry)) < 100_000
    store.close()


def test_eight_clients_create_jobs_quickly_on_sqlite(tmp_path: Path, spec: JobSpec) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'shoal.db'}")
    started = time.process_time()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: store.create_job(spec, idempotency_key=None, now=1.0), range(400)))
    each_s = (time.process_time() - started) / 400
    store.close()
    assert each_s < 0.005
