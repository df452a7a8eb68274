"""Reports of many supervisors are stored in few transactions, each exactly once; an error is its own request's."""

import asyncio
import time
from typing import Any

from kit.views import series_point
from shoal_service.clock import SystemClock
from shoal_service.control.supervisor_reports import ReportWriter, SupervisorLinks
from shoal_service.core.access import hash_secret
from shoal_service.home import AttemptCaller, HomeReport, ReportReceipt
from shoal_service.reports import SupervisorReports
from shoal_service.store import driving, histories, submissions, supervisor_links
from shoal_service.store.errors import AttemptTokenRefused, SupervisorReplaced
from shoal_service.store.store import Store
from shoal_service.store.supervisor_links import ReceivedReport
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState

SPEC: dict[str, Any] = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 4}}


def running(store: Store, number: int) -> list[str]:
    """Ids of jobs with an attempt, whose token is the id."""
    now = time.time()
    lease = store.acquire_lease("me", ttl_s=600, now=now)
    assert lease is not None
    ids = [
        store.writing(submissions.create)(parse_spec(SPEC), idempotency_key=None, now=now)[0].id for _ in range(number)
    ]
    for job_id in ids:
        store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=1, now=now)
        store.writing(supervisor_links.keep_token, lease.epoch)(job_id, 1, job_id)
    return ids


def arrived(job_id: str, number: int, *, token: str = "", life: int = 1) -> ReceivedReport:
    caller = AttemptCaller(job_id, 1, hash_secret(token or job_id))
    return ReceivedReport(caller, HomeReport(life=life, after=number - 1, reports=step(number)), time.time())


def num_writes(store: Store) -> int:
    return store.tallies.seconds.values()["write",].count


def num_reads(store: Store) -> int:
    seconds = store.tallies.seconds.values().get(("read",))
    return seconds.count if seconds is not None else 0


def step(number: int) -> SupervisorReports:
    point = series_point(number, at=1.0, world_size=1)
    return SupervisorReports(
        attempt=1, seq=number, series=(point,), status=JobStatus(state=JobState.RUNNING, step=number)
    )


async def test_what_arrives_while_one_transaction_is_written_is_the_next_one(store: Store) -> None:
    ids = running(store, 20)
    writer = ReportWriter(store, SystemClock())
    before = num_writes(store)
    for number in (1, 2):
        await asyncio.gather(*(writer.store(arrived(job_id, number)) for job_id in ids))
    assert num_writes(store) - before == 2
    for job_id in ids:
        assert store.get_job(job_id).status.step == 2
        assert [point.step for point in store.reading(histories.read_series)(job_id)] == [1, 2]


async def test_one_that_is_refused_does_not_keep_the_others_from_it(store: Store) -> None:
    ids = running(store, 4)
    writer = ReportWriter(store, SystemClock())
    await writer.store(arrived(ids[2], 1, life=2))
    wanted = [
        arrived(ids[0], 1),
        arrived(ids[1], 1, token=ids[0]),
        arrived("nothing", 1),
        arrived(ids[2], 2, life=1),
        arrived(ids[3], 1),
    ]
    results = await asyncio.gather(*map(writer.store, wanted), return_exceptions=True)
    kinds = [ReportReceipt, AttemptTokenRefused, AttemptTokenRefused, SupervisorReplaced, ReportReceipt]
    assert [type(result) for result in results] == kinds
    assert [store.get_job(job_id).status.step for job_id in ids] == [1, 0, 1, 1]


async def test_reports_of_a_request_that_was_cancelled_are_stored_and_disturb_no_other(store: Store) -> None:
    [first, second] = running(store, 2)
    writer = ReportWriter(store, SystemClock())
    cancelled = asyncio.create_task(writer.store(arrived(first, 1)))
    other = asyncio.create_task(writer.store(arrived(second, 1)))
    await asyncio.sleep(0)
    cancelled.cancel()
    await other
    assert store.get_job(second).status.step == 1


class SlowClock(SystemClock):
    """Half a second passes between two looks, as in a process where thousands of drivers begin together."""

    now_mono = 0.0

    def monotonic(self) -> float:
        self.now_mono += 0.5
        return self.now_mono


async def test_drivers_that_ask_together_share_a_reading_of_the_links(store: Store) -> None:
    """After a takeover every driver asks. Each of them read all links again, since those were old at its turn."""
    links, before = SupervisorLinks(store, SlowClock()), num_reads(store)
    await asyncio.gather(*(links.find_link((f"job-{number}", 1), newest=True) for number in range(500)))
    assert num_reads(store) - before == 1, "it begins after all have asked"
    await asyncio.gather(*(links.find_link((f"job-{number}", 1)) for number in range(500)))
    assert num_reads(store) - before == 2, "drivers that look at the same time share one too"
    [job_id] = running(store, 1)
    assert await links.find_link((job_id, 1), newest=True) is not None, "what was committed since is seen"
