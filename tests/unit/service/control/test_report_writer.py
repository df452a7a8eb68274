"""Reports of many supervisors are stored in few transactions, each exactly once; an error is its own driver's."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from doubles.event_loop import run
from shoal_service.clock import SystemClock
from shoal_service.control.supervisors.report_writer import ReportWriter
from shoal_service.reports import SupervisorReports
from shoal_service.store.errors import JobNotFound, LeaseLost
from shoal_service.store.store import Store
from shoal_service.views import JobStatus, SeriesPoint
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState

SPEC: dict[str, Any] = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 4}}


def running(store: Store, number: int) -> tuple[list[str], int]:
    """Ids of jobs with an attempt, and the epoch of the lease."""
    now = time.time()
    lease = store.acquire_lease("me", ttl_s=600, now=now)
    assert lease is not None
    ids = [store.create_job(parse_spec(SPEC), idempotency_key=None, now=now)[0].id for _ in range(number)]
    for job_id in ids:
        store.begin_attempt(job_id, workers=1, epoch=lease.epoch, now=now)
    return ids, lease.epoch


def num_writes(store: Store) -> int:
    return store.tallies.seconds.values()["write",].count


def step(number: int) -> SupervisorReports:
    point = SeriesPoint(
        step=number, at=1.0, loss=1.0, grad_norm=1.0, lr=0.1, tokens_per_s=1.0, step_s=1.0, world_size=1, generation=1
    )
    return SupervisorReports(
        attempt=1, seq=number, series=(point,), status=JobStatus(state=JobState.RUNNING, step=number)
    )


def test_what_arrives_while_one_transaction_is_written_is_the_next_one(store: Store) -> None:
    async def main() -> None:
        ids, epoch = running(store, 20)
        writer = ReportWriter(store, SystemClock())
        before = num_writes(store)
        for number in (1, 2):
            await asyncio.gather(*(writer.store(i, step(number), epoch=epoch, now=time.time()) for i in ids))
        assert num_writes(store) - before == 2
        for job_id in ids:
            assert store.get_job(job_id).status.step == 2
            assert [point.step for point in store.series(job_id)] == [1, 2]

    run(main())


def test_one_that_cannot_be_stored_does_not_keep_the_others_from_it(store: Store) -> None:
    async def main() -> None:
        ids, epoch = running(store, 3)
        writer = ReportWriter(store, SystemClock())
        wanted = [*ids[:2], "nothing", ids[2]]
        results = await asyncio.gather(
            *(writer.store(i, step(1), epoch=epoch, now=time.time()) for i in wanted), return_exceptions=True
        )
        assert [type(result) for result in results] == [type(None), type(None), JobNotFound, type(None)]
        assert [store.get_job(job_id).status.step for job_id in ids] == [1, 1, 1]

    run(main())


def test_a_driver_of_an_older_lease_gets_its_error(store: Store) -> None:
    async def main() -> None:
        [first, second], epoch = running(store, 2)
        writer = ReportWriter(store, SystemClock())
        stale = asyncio.create_task(writer.store(first, step(1), epoch=epoch - 1, now=time.time()))
        await writer.store(second, step(1), epoch=epoch, now=time.time())
        with pytest.raises(LeaseLost):
            await stale
        assert store.get_job(second).status.step == 1 and store.get_job(first).status.step == 0

    run(main())


def test_reports_of_a_driver_that_was_cancelled_are_stored_and_disturb_no_other(store: Store) -> None:
    async def main() -> None:
        [first, second], epoch = running(store, 2)
        writer = ReportWriter(store, SystemClock())
        cancelled = asyncio.create_task(writer.store(first, step(1), epoch=epoch, now=time.time()))
        other = asyncio.create_task(writer.store(second, step(1), epoch=epoch, now=time.time()))
        await asyncio.sleep(0)
        cancelled.cancel()
        await other
        assert store.get_job(second).status.step == 1

    run(main())
