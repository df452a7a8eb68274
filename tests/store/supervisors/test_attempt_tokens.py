"""Reports of supervisors are fenced by token, attempt, life and number, on both databases."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event

from kit.attempt_reports import reported, sent, take
from shoal_service.core.access import hash_secret
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.goodput import Goodput
from shoal_service.home import AttemptCaller, ReportReceipt
from shoal_service.reports import PendingEvent, SupervisorReports
from shoal_service.store import Lease, Store, curves, histories, supervisor_links
from shoal_service.store.errors import AttemptTokenRefused, JobNotFound, LeaseLost, SupervisorReplaced
from shoal_service.store.reporting import DropReason
from shoal_service.store.supervisor_links import SupervisorLink
from shoal_workers.contract.job import EndReason

Begin = Callable[..., Any]
Submit = Callable[..., str]


@pytest.fixture
def running(store: Store, lease: Lease, submit: Submit, begin: Begin) -> Callable[[], str]:
    """Submits a job whose first attempt has begun; the token of the attempt is the job's id."""

    def _running() -> str:
        job_id = submit()
        begin(job_id)
        store.writing(supervisor_links.keep_token, lease.epoch)(job_id, 1, job_id)
        return job_id

    return _running


def steps_of(store: Store, job_id: str) -> list[int]:
    return [one.step for one in store.reading(histories.read_series)(job_id)]


def test_a_token_opens_the_attempt_that_it_was_made_for(store: Store, running: Callable[[], str]) -> None:
    job_id = running()
    assert store.reading(supervisor_links.find_attempt_by_token)(job_id) == AttemptCaller(
        job_id, 1, hash_secret(job_id)
    )
    assert store.reading(supervisor_links.find_attempt_by_token)("another") is None


def test_only_the_holder_of_the_lease_makes_tokens(store: Store, lease: Lease, running: Callable[[], str]) -> None:
    job_id = running()
    with pytest.raises(LeaseLost):
        store.writing(supervisor_links.keep_token, lease.epoch + 1)(job_id, 1, "new")
    with pytest.raises(JobNotFound):
        store.writing(supervisor_links.keep_token, lease.epoch)("nothing", 1, "new")
    assert store.reading(supervisor_links.find_attempt_by_token)(job_id) is not None


def test_a_new_token_ends_the_one_before_and_keeps_the_life(
    store: Store, lease: Lease, running: Callable[[], str]
) -> None:
    job_id = running()
    take(store, sent(job_id, reported(1, 1), life=3))
    store.writing(supervisor_links.keep_token, lease.epoch)(job_id, 1, "second")
    assert store.reading(supervisor_links.find_attempt_by_token)(job_id) is None
    late, early, fresh = take(
        store,
        sent(job_id, reported(2, 2), after=1, life=3),
        sent(job_id, reported(2, 2), after=1, life=2, token="second"),
        sent(job_id, reported(2, 2), after=1, life=4, token="second"),
    )
    assert isinstance(late, AttemptTokenRefused) and isinstance(early, SupervisorReplaced)
    assert fresh == ReportReceipt(acknowledged=2)
    assert store.reading(supervisor_links.read_links)()[job_id, 1] == SupervisorLink(
        has_token=True, life=4, reported_at=20.0
    )


def test_a_report_with_a_foreign_token_or_of_another_attempt_stores_nothing(
    store: Store, running: Callable[[], str]
) -> None:
    job_id, other = running(), running()
    outcomes = take(
        store,
        sent(job_id, reported(1, 1), token=other),
        sent(job_id, reported(1, 1), attempt=2),
        sent(job_id, reported(1, 1, attempt=2)),
        sent("nothing", reported(1, 1)),
    )
    assert [type(one) for one in outcomes] == [AttemptTokenRefused] * 4
    assert steps_of(store, job_id) == []
    assert store.reading(supervisor_links.read_links)()[job_id, 1].reported_at == 0.0, (
        "a refused report is no sign of life"
    )


def test_the_token_ends_with_the_attempt(store: Store, lease: Lease, running: Callable[[], str], begin: Begin) -> None:
    job_id = running()
    [ended] = take(store, sent(job_id, reported(1, end=AttemptEnd(reason=EndReason.PREEMPTED, message="", step=0))))
    assert ended == ReportReceipt(acknowledged=1, released=True)
    assert store.reading(supervisor_links.find_attempt_by_token)(job_id) is None
    assert store.reading(supervisor_links.read_links)() == {}
    begin(job_id)
    [late] = take(store, sent(job_id, reported(2, 2), after=1))
    assert isinstance(late, AttemptTokenRefused)
    with pytest.raises(AttemptTokenRefused):
        store.reading(supervisor_links.read_directive)(job_id, 1)
    assert store.reading(supervisor_links.find_attempt_by_token)(job_id) is None, (
        "the row is that of the attempt before"
    )
    store.writing(supervisor_links.keep_token, lease.epoch)(job_id, 2, "second")
    assert store.reading(supervisor_links.find_attempt_by_token)("second") == AttemptCaller(
        job_id, 2, hash_secret("second")
    )
    assert store.reading(supervisor_links.read_links)()[job_id, 2].life in (0, 1)


def test_lives_rise_and_the_supervisor_before_learns_who_follows_it(store: Store, running: Callable[[], str]) -> None:
    job_id = running()
    first, second, late = take(
        store, sent(job_id, None, life=1), sent(job_id, None, life=2), sent(job_id, reported(1, 1), life=1)
    )
    assert first == second == ReportReceipt(acknowledged=0)
    assert isinstance(late, SupervisorReplaced) and (late.life, late.current_life) == (1, 2)
    assert steps_of(store, job_id) == []


def test_what_was_stored_before_is_not_stored_again(store: Store, running: Callable[[], str]) -> None:
    job_id = running()
    item = PendingEvent(at=1.0, type="task.note", data={"text": "once"})
    first = sent(job_id, reported(1, 1, events=(item,)))
    again, after = sent(job_id, reported(2, 1, 2, events=(item,))), sent(job_id, reported(2, 2), after=1)
    assert take(store, first) == [ReportReceipt(acknowledged=1)]
    assert take(store, again) == [ReportReceipt(acknowledged=1)], "its `after` repeats what is stored"
    assert take(store, after) == [ReportReceipt(acknowledged=2)]
    assert steps_of(store, job_id) == [1, 2]
    assert [one.type for one in store.reading(histories.read_events)(job_id)].count("task.note") == 1
    assert store.tallies.counts.value("DropReason", DropReason.DUPLICATE) == 1


def test_two_reports_of_one_job_in_one_transaction_are_stored_in_their_order(
    store: Store, running: Callable[[], str]
) -> None:
    ids = [running() for _ in range(3)]
    arrived = [sent(job_id, reported(1, 1)) for job_id in ids]
    arrived += [sent(job_id, reported(2, 2), after=1) for job_id in ids]
    arrived.append(sent(ids[0], reported(1, 1)))
    outcomes = take(store, *arrived)
    assert [one.acknowledged for one in outcomes] == [1, 1, 1, 2, 2, 2, 2]
    for job_id in ids:
        assert steps_of(store, job_id) == [1, 2]
        assert store.get_job(job_id).status.step == 2


def test_reports_that_are_stored_together_change_each_job_as_one_that_is_stored_alone(
    store: Store, running: Callable[[], str]
) -> None:
    """With everything that a report may have, rolled up and sampled."""

    def reports(first: int) -> list[SupervisorReports]:
        end = AttemptEnd(reason=EndReason.FINISHED, message="", step=first + 80)
        goodput = Goodput(at=20.0, seconds={"productive": 50.0 + first}, total=100.0, ratio=0.5)
        return [
            reported(1, *range(first, first + 70), status={"goodput": goodput}),
            reported(2, *range(first + 70, first + 80), events=(PendingEvent(at=1.0, type="task.note"),)),
            reported(3, first + 80, end=end),
        ]

    together, alone = [running() for _ in range(4)], [running() for _ in range(4)]
    for number in range(3):
        take(store, *(sent(one, reports(7 * n + 1)[number], after=number) for n, one in enumerate(together)))
        for n, one in enumerate(alone):
            take(store, sent(one, reports(7 * n + 1)[number], after=number))
    for left, right in zip(together, alone, strict=True):
        assert store.reading(curves.read_curve)(left, max_points=9) == store.reading(curves.read_curve)(
            right, max_points=9
        )
        assert store.reading(histories.read_series)(left) == store.reading(histories.read_series)(right)
        assert store.get_job(left).status == store.get_job(right).status
        assert [(one.type, one.data) for one in store.reading(histories.read_events)(left)] == [
            (one.type, one.data) for one in store.reading(histories.read_events)(right)
        ]
        assert store.reading(curves.read_samples)(left) == store.reading(curves.read_samples)(right)


def test_few_statements_store_the_reports_of_many_jobs(store: Store, running: Callable[[], str]) -> None:
    ids = [running() for _ in range(20)]
    take(store, *(sent(one, reported(1, 1)) for one in ids))
    with counted_statements(store) as count:
        take(store, *(sent(one, reported(2, 2), after=1) for one in ids))
    assert count() <= 10, "each job had five of its own before"


def test_reports_of_the_same_jobs_in_other_orders_do_not_block_each_other(
    store: Store, running: Callable[[], str]
) -> None:
    ids = [running() for _ in range(6)]
    errors: list[BaseException] = []

    def report(order: list[str]) -> None:
        try:
            for _ in range(10):
                take(store, *(sent(one, None) for one in order))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=report, args=(order,)) for order in (ids, ids[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


@contextmanager
def counted_statements(store: Store) -> Iterator[Callable[[], int]]:
    statements: list[Any] = []
    engine = store._database._engine

    def count(*arguments: Any) -> None:
        statements.append(arguments)

    event.listen(engine, "before_cursor_execute", count)
    yield lambda: len(statements)
    event.remove(engine, "before_cursor_execute", count)
