import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.service import SupervisorRestarted
from shoal_service.store import Lease, Store, driving, histories, submissions
from shoal_service.store.hub import Hub, Topic
from shoal_workers.contract.job import EndReason

Submit = Callable[..., str]
Begin = Callable[..., Any]


def test_subscribers_are_notified_of_commits_of_their_job_until_they_close(store: Store, submit: Submit) -> None:
    first, second = submit(), submit()
    notified_of_first: list[str] = []
    notified_of_all: list[str] = []
    with store.subscribe(notified_of_first.append, first), store.subscribe(notified_of_all.append):
        store.writing(submissions.request)(first, Desired.PAUSE, now=2.0)
        store.writing(submissions.request)(first, Desired.PAUSE, now=2.0)  # no change, no notification
        store.writing(submissions.request)(second, Desired.PAUSE, now=2.0)
    store.writing(submissions.request)(first, Desired.RUN, now=3.0)
    assert notified_of_first == [first]
    assert notified_of_all == [first, second]


def test_requests_are_notified_apart_from_the_progress_of_jobs(store: Store, begin: Begin, submit: Submit) -> None:
    notified: list[str] = []
    with store.subscribe(notified.append, Topic.REQUESTS):
        job_id = submit()
        attempt = begin(job_id)
        assert notified == [job_id], "the scheduler's own decision is no request"
        attempt.report(status_step=1)
        assert notified == [job_id]
        store.writing(submissions.request)(job_id, Desired.PAUSE, now=12.0)
        attempt.report(end=AttemptEnd(reason=EndReason.PAUSED, message="", step=1))
        assert notified == [job_id, job_id, job_id], "it has freed workers"


def test_a_notification_follows_the_commit(store: Store, lease: Lease, job_id: str) -> None:
    seen: list[int] = []
    with store.subscribe(lambda reported: seen.append(len(store.reading(histories.read_events)(reported))), job_id):
        store.writing(driving.record_event, lease.epoch)(job_id, SupervisorRestarted(found=1, of=1), now=2.0)
    assert seen == [2]


def test_closed_subscriptions_are_removed() -> None:
    hub = Hub()
    subscriptions = [hub.subscribe(lambda _: None, f"job-{i}") for i in range(10)]
    assert hub.num_subscriptions == 10
    for subscription in subscriptions:
        subscription.close()
        subscription.close()
    assert hub.num_subscriptions == 0


def test_a_failing_listener_is_removed_and_the_others_are_notified(caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub()
    loop = asyncio.new_event_loop()
    loop.close()
    hub.subscribe(lambda _: loop.call_soon_threadsafe(print), "job")
    notified: list[str] = []
    hub.subscribe(notified.append, "job")
    hub.publish("job")
    assert notified == ["job"]
    assert hub.num_subscriptions == 1
    assert "subscription.failed" in caplog.text


def test_an_asyncio_reader_wakes_up(store: Store, job_id: str) -> None:

    async def wait() -> None:
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        with store.subscribe(lambda _: loop.call_soon_threadsafe(woken.set), job_id):
            await asyncio.to_thread(store.writing(submissions.request), job_id, Desired.PAUSE, now=2.0)
            await asyncio.wait_for(woken.wait(), timeout=60)

    asyncio.run(wait())
