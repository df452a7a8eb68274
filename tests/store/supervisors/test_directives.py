"""Directives for supervisors: written by the holder of the lease only, numbered per attempt, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kit.attempt_reports import reported, sent, take
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import StacksAnswer, SupervisorReports
from shoal_service.store import Lease, Store
from shoal_service.store.errors import AttemptTokenRefused, JobNotFound, LeaseLost
from shoal_service.store.supervisors.methods import StoredDirective, directives_of
from shoal_service.views import JobStatus
from shoal_workers.contract.job import EndReason, JobState

Begin = Callable[..., Any]
Submit = Callable[..., str]


@pytest.fixture
def job_id(store: Store, lease: Lease, submit: Submit, begin: Begin) -> str:
    """A job whose first attempt has begun."""
    found = submit()
    begin(found)
    store.keep_attempt_token(found, 1, found, epoch=lease.epoch)
    return found


def test_numbers_rise_with_each_directive_and_only_the_newest_is_kept(store: Store, lease: Lease, job_id: str) -> None:
    assert store.directive(job_id, 1) is None
    assert [store.put_directive(job_id, 1, body, epoch=lease.epoch) for body in ("{}", '{"a":1}')] == [1, 2]
    assert store.directive(job_id, 1) == StoredDirective(2, '{"a":1}')
    assert store.directive_numbers({job_id}) == {job_id: 2}
    assert store.directive_numbers({"another"}) == {}


def test_the_next_attempt_begins_with_number_one(store: Store, lease: Lease, job_id: str, begin: Begin) -> None:
    store.put_directive(job_id, 1, '{"a":1}', epoch=lease.epoch)
    store.put_directive(job_id, 1, '{"a":2}', epoch=lease.epoch)
    end = AttemptEnd(reason=EndReason.PREEMPTED, message="", step=0)
    status = JobStatus(state=JobState.RUNNING)
    store.apply(job_id, SupervisorReports(attempt=1, seq=1, status=status, end=end), epoch=lease.epoch, now=20.0)
    assert store.directive_numbers({job_id}) == {}, "no supervisor waits for those of an attempt that is over"
    begin(job_id)
    with pytest.raises(AttemptTokenRefused):
        store.directive(job_id, 1)
    assert store.directive(job_id, 2) is None, "the row is that of the attempt before"
    assert store.put_directive(job_id, 2, "{}", epoch=lease.epoch) == 1


def test_a_control_plane_without_the_lease_writes_none(store: Store, lease: Lease, job_id: str) -> None:
    store.put_directive(job_id, 1, "{}", epoch=lease.epoch)
    for epoch in (lease.epoch - 1, lease.epoch + 1):
        with pytest.raises(LeaseLost):
            store.put_directive(job_id, 1, '{"late":1}', epoch=epoch)
    with pytest.raises(JobNotFound):
        store.put_directive("nothing", 1, "{}", epoch=lease.epoch)
    assert store.directive(job_id, 1) == StoredDirective(1, "{}")


def test_the_next_holder_of_the_lease_goes_on_counting(store: Store, lease: Lease, job_id: str) -> None:
    store.put_directive(job_id, 1, "{}", epoch=lease.epoch)
    store.release_lease("owner-1")
    second = store.acquire_lease("owner-2", ttl_s=60.0, now=10.0)
    assert second is not None and second.epoch > lease.epoch
    assert store.put_directive(job_id, 1, '{"b":1}', epoch=second.epoch) == 2
    with pytest.raises(LeaseLost):
        store.put_directive(job_id, 1, "{}", epoch=lease.epoch)


def test_who_waits_for_a_directive_is_notified_and_who_watches_the_job_is_not(
    store: Store, lease: Lease, job_id: str
) -> None:
    waiting: list[str] = []
    watching: list[str] = []
    with store.subscribe(waiting.append, directives_of(job_id)), store.subscribe(watching.append, job_id):
        store.put_directive(job_id, 1, "{}", epoch=lease.epoch)
    assert (waiting, watching) == ([directives_of(job_id)], [])


def test_an_answer_is_that_of_its_request_and_stays_while_directives_change(
    store: Store, lease: Lease, job_id: str
) -> None:
    store.put_directive(job_id, 1, "{}", epoch=lease.epoch)
    take(store, sent(job_id, reported(1, stacks=StacksAnswer(number=7, stacks=None))))
    store.put_directive(job_id, 1, '{"c":1}', epoch=lease.epoch)
    assert store.stacks_answer(job_id, 1, 7) == StacksAnswer(number=7, stacks=None)
    assert store.stacks_answer(job_id, 1, 8) is None
    assert store.stacks_answer(job_id, 2, 7) is None
