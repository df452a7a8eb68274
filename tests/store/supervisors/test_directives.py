"""Directives for supervisors: written by the holder of the lease only, numbered per attempt, on both databases."""

from collections.abc import Callable
from typing import Any

import pytest

from kit.attempt_reports import reported, sent, take
from shoal_service.core.endings import AttemptEnd
from shoal_service.home import DirectiveAnswer
from shoal_service.reports import StacksAnswer, SupervisorReports
from shoal_service.store import Lease, Store, reporting, supervisor_links
from shoal_service.store.errors import AttemptTokenRefused, LeaseLost
from shoal_service.store.hub import Topic
from shoal_service.views import JobStatus
from shoal_workers.contract.job import EndReason, JobState

Begin = Callable[..., Any]
Submit = Callable[..., str]


@pytest.fixture
def job_id(store: Store, lease: Lease, submit: Submit, begin: Begin) -> str:
    """A job whose first attempt has begun."""
    found = submit()
    begin(found)
    store.writing(supervisor_links.keep_token, lease.epoch)(found, 1, found)
    return found


def test_numbers_rise_with_each_directive_and_only_the_newest_is_kept(store: Store, lease: Lease, job_id: str) -> None:
    assert store.reading(supervisor_links.read_directive)(job_id, 1) is None
    assert [
        store.writing(supervisor_links.put_directive, lease.epoch)(job_id, 1, body) for body in ("{}", '{"a":1}')
    ] == [1, 2]
    assert store.reading(supervisor_links.read_directive)(job_id, 1) == DirectiveAnswer(number=2, directive={"a": 1})
    assert store.reading(supervisor_links.read_directive_numbers)({job_id}) == {job_id: 2}
    assert store.reading(supervisor_links.read_directive_numbers)({"another"}) == {}


def test_the_next_attempt_begins_with_number_one(store: Store, lease: Lease, job_id: str, begin: Begin) -> None:
    store.writing(supervisor_links.put_directive, lease.epoch)(job_id, 1, '{"a":1}')
    store.writing(supervisor_links.put_directive, lease.epoch)(job_id, 1, '{"a":2}')
    end = AttemptEnd(reason=EndReason.PREEMPTED, message="", step=0)
    status = JobStatus(state=JobState.RUNNING)
    store.writing(reporting.apply, lease.epoch)(
        job_id, SupervisorReports(attempt=1, seq=1, status=status, end=end), now=20.0
    )
    assert store.reading(supervisor_links.read_directive_numbers)({job_id}) == {}, (
        "no supervisor waits for those of an attempt that is over"
    )
    begin(job_id)
    with pytest.raises(AttemptTokenRefused):
        store.reading(supervisor_links.read_directive)(job_id, 1)
    assert store.reading(supervisor_links.read_directive)(job_id, 2) is None, "the row is that of the attempt before"
    assert store.writing(supervisor_links.put_directive, lease.epoch)(job_id, 2, "{}") == 1


def test_the_next_holder_of_the_lease_goes_on_counting(store: Store, lease: Lease, job_id: str) -> None:
    store.writing(supervisor_links.put_directive, lease.epoch)(job_id, 1, "{}")
    store.release_lease("owner-1")
    second = store.acquire_lease("owner-2", ttl_s=60.0, now=10.0)
    assert second is not None and second.epoch > lease.epoch
    assert store.writing(supervisor_links.put_directive, second.epoch)(job_id, 1, '{"b":1}') == 2
    with pytest.raises(LeaseLost):
        store.writing(supervisor_links.put_directive, lease.epoch)(job_id, 1, "{}")


def test_who_waits_for_a_directive_is_notified_and_who_watches_the_job_is_not(
    store: Store, lease: Lease, job_id: str
) -> None:
    waiting: list[str] = []
    watching: list[str] = []
    with store.subscribe(waiting.append, Topic.DIRECTIVES.narrow_to(job_id)), store.subscribe(watching.append, job_id):
        store.writing(supervisor_links.put_directive, lease.epoch)(job_id, 1, "{}")
    assert (waiting, watching) == ([Topic.DIRECTIVES.narrow_to(job_id)], [])


def test_an_answer_is_that_of_its_request_and_stays_while_directives_change(
    store: Store, lease: Lease, job_id: str
) -> None:
    store.writing(supervisor_links.put_directive, lease.epoch)(job_id, 1, "{}")
    take(store, sent(job_id, reported(1, stacks=StacksAnswer(number=7, stacks=None))))
    store.writing(supervisor_links.put_directive, lease.epoch)(job_id, 1, '{"c":1}')
    assert store.reading(supervisor_links.read_stacks_answer)(job_id, 1, 7) == StacksAnswer(number=7, stacks=None)
    assert store.reading(supervisor_links.read_stacks_answer)(job_id, 1, 8) is None
    assert store.reading(supervisor_links.read_stacks_answer)(job_id, 2, 7) is None
