"""The queue, and why running jobs get no more workers: what is stored, shown, and answered."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select

from kit.store_calls import set_queue as write_places
from shoal_service.core.desired import Desired
from shoal_service.core.scheduling.explaining import GrowthLimit, HeldBack
from shoal_service.core.scheduling.market import Wait
from shoal_service.store import Lease, Store, driving, histories, job_lists, queueing, submissions
from shoal_service.store.database import queue_places, upsert
from shoal_service.store.queueing import REWRITE_S
from shoal_service.views import ElasticityPatch, GrowthAnswer, JobPatch, QueuePlace
from shoal_workers.contract.job import JobState

Submit = Callable[..., str]
Begin = Callable[..., Any]
SetQueue = Callable[..., None]


@pytest.fixture
def set_queue(store: Store, lease: Lease) -> SetQueue:
    def _set(*waits: Wait, now: float = 10.0) -> None:
        write_places(store, waits, epoch=lease.epoch, now=now)

    return _set


def test_a_queued_job_shows_its_place_and_who_holds_what_it_waits_for(
    store: Store, submit: Submit, set_queue: SetQueue
) -> None:
    holder, waiting, other = submit(), submit(project="vision"), submit()
    set_queue(Wait(waiting, "Needs 2 workers.", 1, (holder,), 70.0), Wait(other, "Waits behind it.", 2))
    job = store.get_job(waiting)
    assert job.queue == QueuePlace(
        position=1, reason="Needs 2 workers.", holders=(holder,), expected_at=70.0, decided_at=10.0, waiting_since=1.0
    )
    assert (job.status.reason, job.status.message) == ("capacity", "Needs 2 workers.")
    listed = {one.id: one for one in store.reading(job_lists.page)().items}
    one = listed[waiting]
    assert (one.queue_position, one.reason, one.project) == (1, "capacity", "vision")
    assert (listed[holder].queue_position, listed[holder].reason) == (None, "")
    assert store.get_job(holder).queue is None


def test_the_whole_queue_is_shown_in_its_order(store: Store, submit: Submit, set_queue: SetQueue) -> None:
    late, early, unseen, urgent = submit(), submit(), submit(), submit(priority=5)
    set_queue(Wait(late, "b", 2), Wait(early, "a", 1))
    shown = store.reading(queueing.view)()
    assert [one.job_id for one in shown.items] == [early, late, urgent, unseen]
    assert [one.place.position if one.place else None for one in shown.items] == [1, 2, None, None]
    assert shown.num_queued == 4 and [one.name for one in shown.projects] == ["default"]
    assert [one.job_id for one in store.reading(queueing.view)(limit=1).items] == [early]


def test_an_expected_start_is_written_again_only_if_it_moves_by_a_fifth_of_the_time_left(
    store: Store, submit: Submit, set_queue: SetQueue
) -> None:
    job_id = submit()

    def expected(at: float | None, now: float) -> float | None:
        set_queue(Wait(job_id, "Needs 2 workers.", 1, (), at), now=now)
        place = store.get_job(job_id).queue
        assert place is not None
        return place.expected_at

    assert expected(1010.0, 10.0) == 1010.0
    assert expected(1190.0, 20.0) == 1010.0, "15 % of what is left"
    assert expected(1300.0, 20.0) == 1300.0
    assert expected(1304.0, 1290.0) == 1300.0, "a few seconds"
    assert expected(1305.0, 1301.0) == 1305.0, "the time is over"
    assert expected(None, 1302.0) is None


def test_a_place_says_since_when_the_job_waits(store: Store, submit: Submit, set_queue: SetQueue) -> None:
    job_id = submit()
    created_at = store.get_job(job_id).created_at
    set_queue(Wait(job_id, "Needs 2 workers.", 1))
    place = store.get_job(job_id).queue
    assert place is not None and place.waiting_since == created_at
    [item] = store.reading(queueing.view)().items
    assert item.place == place


def test_the_next_order_replaces_the_last_one(store: Store, submit: Submit, set_queue: SetQueue) -> None:
    one, two = submit(), submit()
    set_queue(Wait(one, "a", 1), Wait(two, "b", 2))
    set_queue(Wait(two, "b", 1), now=20.0)
    assert store.get_job(one).queue is None
    place = store.get_job(two).queue
    assert place is not None and (place.position, place.decided_at) == (1, 20.0)
    set_queue(now=30.0)
    assert store.get_job(two).queue is None


def test_what_stays_the_same_is_not_written_again(store: Store, set_queue: SetQueue, job_id: str) -> None:
    for at, now, written_at in ((100.0, 10.0, 10.0), (104.0, 20.0, 10.0), (125.0, 30.0, 30.0), (None, 40.0, 40.0)):
        set_queue(Wait(job_id, "a", 1, (), at), now=now)
        place = store.get_job(job_id).queue
        assert place is not None and place.decided_at == written_at
    assert [event.type for event in store.reading(histories.read_events)(job_id)] == ["job.created"]


def test_a_job_that_leaves_the_queue_has_no_place(
    store: Store, submit: Submit, begin: Begin, set_queue: SetQueue
) -> None:
    started, paused, cancelled = submit(), submit(), submit()
    set_queue(Wait(started, "a", 1), Wait(paused, "b", 2), Wait(cancelled, "c", 3))
    attempt = begin(started)
    store.writing(submissions.request)(paused, Desired.PAUSE, now=11.0)
    store.writing(submissions.request)(cancelled, Desired.CANCEL, now=11.0)
    assert store.reading(queueing.view)().items == ()
    for job_id in (started, paused, cancelled):
        job = store.get_job(job_id)
        assert job.queue is None and job.status.reason != "capacity"
    set_queue(Wait(started, "late", 1), now=12.0)
    attempt.report(JobState.RUNNING)
    assert store.get_job(started).queue is None and store.get_job(started).status.message != "late"


def test_a_place_that_was_written_while_its_job_left_the_queue_goes_with_the_next_order(
    store: Store, lease: Lease, submit: Submit, begin: Begin, set_queue: SetQueue
) -> None:
    started, waiting = submit(), submit()
    with store._database.read() as tx:
        late = queueing.differing(tx, [Wait(started, "a", 1)], now=10.0, most=10)
    begin(started)
    with store._database.write() as tx:
        queueing.save_places(tx, late)
        assert [row.job_num for row in tx.execute(select(queue_places))] == [], "its job has left the queue"
        upsert(tx, queue_places, list(late.placed))
    set_queue(Wait(waiting, "b", 1))
    with store._database.read() as tx:
        assert [row.reason for row in tx.execute(select(queue_places))] == ["b"]


def test_a_job_that_has_returned_to_the_queue_gets_its_place_again(
    store: Store, set_queue: SetQueue, job_id: str
) -> None:
    for now in (10.0, 20.0):
        set_queue(Wait(job_id, "a", 1), now=now)
        place = store.get_job(job_id).queue
        assert place is not None and place.decided_at == now
        store.writing(submissions.request)(job_id, Desired.PAUSE, now=now)
        assert store.get_job(job_id).queue is None
        store.writing(submissions.request)(job_id, Desired.RUN, now=now)


def test_a_long_queue_is_written_in_parts_and_nobody_is_left_out(store: Store, lease: Lease, submit: Submit) -> None:
    ids = [submit() for _ in range(5)]
    save = partial(write_places, store, epoch=lease.epoch, most=2)
    for now in range(1, 6):  # all of them move each time
        save([Wait(job_id, "a", i) for i, job_id in enumerate(ids, now)], now=float(now))
    written = {
        one.job_id: one.place.decided_at for one in store.reading(queueing.view)().items if one.place is not None
    }
    assert written.keys() == set(ids) and min(written.values()) == 3.0, "each one in one of three passes"
    order = [Wait(job_id, "a", i) for i, job_id in enumerate(ids, 1)]
    assert [save(order, now=now) for now in (6.0, 7.0, 8.0)] == [False, False, True]
    assert [one.job_id for one in store.reading(queueing.view)().items] == ids


def test_a_reversed_order_is_stored(store: Store, lease: Lease, submit: Submit) -> None:
    ids = [submit() for _ in range(50)]
    save = partial(write_places, store, epoch=lease.epoch)
    save([Wait(job_id, "a", i) for i, job_id in enumerate(ids, 1)], now=1.0)
    save([Wait(job_id, "a", i) for i, job_id in enumerate(reversed(ids), 1)], now=2.0)
    assert [one.job_id for one in store.reading(queueing.view)().items] == ids[::-1]


SetGrowth = Callable[..., None]


@pytest.fixture
def set_growth(store: Store, lease: Lease) -> SetGrowth:
    def _set(*answers: HeldBack, now: float = 10.0, **versions: int) -> None:
        """`versions`: by job id with underscores for dashes; 1 for the jobs of the answers."""
        given = {name.replace("_", "-"): version for name, version in versions.items()}
        known = {answer.job_id: 1 for answer in answers} | given
        store.writing(queueing.save_growth, lease.epoch)(answers, known, now=now)

    return _set


def held(job_id: str, *, workers: int = 1, reason: str = "It ends soon.", **fields: Any) -> HeldBack:
    limit = fields.get("limit", GrowthLimit.PAUSE_COSTS_MORE)
    return HeldBack(job_id, workers, fields.get("max_workers", 4), limit, reason)


def patched(store: Store, job_id: str) -> str:
    store.writing(submissions.patch)(
        job_id, JobPatch(elasticity=ElasticityPatch(max_workers=4)), if_match=None, now=7.0
    )
    return job_id


def answered(store: Store, job_id: str) -> list[tuple[int, str]]:
    """The answers to changes of the spec."""
    return [
        (event.data["workers"], event.data["limit"])
        for event in store.reading(histories.read_events)(job_id)
        if "held_back" in event.type
    ]


def test_the_answer_is_in_the_status_and_in_the_queue(
    store: Store, submit: Submit, begin: Begin, set_growth: SetGrowth
) -> None:
    job_id, other = submit(project="vision"), submit()
    begin(job_id), begin(other)
    set_growth(held(job_id))
    answer = GrowthAnswer(limit=GrowthLimit.PAUSE_COSTS_MORE, reason="It ends soon.", max_workers=4, decided_at=10.0)
    assert store.get_job(job_id).status.held_back == answer
    [shown] = store.reading(queueing.view)().held_back
    assert (shown.job_id, shown.project, shown.workers, shown.answer) == (job_id, "vision", 1, answer)
    assert store.get_job(other).status.held_back is None
    assert store.reading(queueing.view)(limit=1).held_back == (shown,)
    assert answered(store, job_id) == [], "nobody has asked for more"


def test_a_changed_spec_is_answered_with_one_event(
    store: Store, begin: Begin, set_growth: SetGrowth, job_id: str
) -> None:
    begin(job_id)
    patched(store, job_id)
    version = {job_id.replace("-", "_"): 2}
    soon = held(job_id, limit=GrowthLimit.SOON)
    set_growth(soon, **version)
    assert answered(store, job_id) == [], "the next decision may grant it"
    set_growth(held(job_id), **version, now=11.0)
    set_growth(held(job_id, limit=GrowthLimit.NO_ROOM), **version, now=12.0)
    assert answered(store, job_id) == [(1, "pause_costs_more")]
    [event] = [event for event in store.reading(histories.read_events)(job_id) if event.type == "job.held_back"]
    assert event.message == "stays at 1 of 4 workers: It ends soon."


def test_a_request_that_was_granted_is_not_answered_when_others_take_the_workers_later(
    store: Store, begin: Begin, lease: Lease, set_growth: SetGrowth, job_id: str
) -> None:
    begin(job_id, 4)
    patched(store, job_id)
    set_growth(**{job_id.replace("-", "_"): 2})
    store.writing(driving.set_grant, lease.epoch)(job_id, workers=2, reason="Gave 2 workers to job-x.", now=20.0)
    set_growth(held(job_id, workers=2), **{job_id.replace("-", "_"): 2}, now=21.0)
    assert answered(store, job_id) == []
    assert store.get_job(job_id).status.held_back is not None


def test_an_answer_is_shown_only_with_the_grant_that_it_is_about(
    store: Store, lease: Lease, set_growth: SetGrowth, job_id: str, attempt: Any
) -> None:
    set_growth(held(job_id))
    store.writing(driving.set_grant, lease.epoch)(job_id, workers=3, reason="room", now=20.0)
    assert store.get_job(job_id).status.held_back is None and store.reading(queueing.view)().held_back == ()
    set_growth(held(job_id, workers=3), now=21.0)
    attempt.report(JobState.RUNNING)
    assert store.get_job(job_id).status.held_back is not None, "a report does not take it away"
    set_growth(**{job_id.replace("-", "_"): 1}, now=22.0)
    assert store.get_job(job_id).status.held_back is None


def test_numbers_are_written_again_only_now_and_then(
    store: Store, begin: Begin, set_growth: SetGrowth, job_id: str
) -> None:
    begin(job_id)
    for now, decided_at in ((10.0, 10.0), (11.0, 10.0), (10.0 + REWRITE_S, 10.0 + REWRITE_S)):
        set_growth(held(job_id, reason=f"It ends at {now}."), now=now)
        answer = store.get_job(job_id).status.held_back
        assert answer is not None and answer.decided_at == decided_at
