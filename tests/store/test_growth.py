"""Why running jobs get no more workers: what is stored, shown, and answered with an event."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.scheduling.explaining import GrowthLimit, HeldBack
from shoal_service.store import Lease, LeaseLost, Store, driving, histories, queueing, submissions
from shoal_service.store.queueing import REWRITE_S
from shoal_service.views import ElasticityPatch, GrowthAnswer, JobPatch
from shoal_workers.contract.job import JobState

Submit = Callable[..., str]
Begin = Callable[..., Any]
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
    store: Store, submit: Submit, begin: Begin, set_growth: SetGrowth
) -> None:
    job_id = submit()
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
    store: Store, submit: Submit, begin: Begin, lease: Lease, set_growth: SetGrowth
) -> None:
    job_id = submit()
    begin(job_id, 4)
    patched(store, job_id)
    set_growth(**{job_id.replace("-", "_"): 2})
    store.writing(driving.set_grant, lease.epoch)(job_id, workers=2, reason="Gave 2 workers to job-x.", now=20.0)
    set_growth(held(job_id, workers=2), **{job_id.replace("-", "_"): 2}, now=21.0)
    assert answered(store, job_id) == []
    assert store.get_job(job_id).status.held_back is not None


def test_an_answer_is_shown_only_with_the_grant_that_it_is_about(
    store: Store, submit: Submit, begin: Begin, lease: Lease, set_growth: SetGrowth
) -> None:
    job_id = submit()
    attempt = begin(job_id)
    set_growth(held(job_id))
    store.writing(driving.set_grant, lease.epoch)(job_id, workers=3, reason="room", now=20.0)
    assert store.get_job(job_id).status.held_back is None and store.reading(queueing.view)().held_back == ()
    set_growth(held(job_id, workers=3), now=21.0)
    attempt.report(JobState.RUNNING)
    assert store.get_job(job_id).status.held_back is not None, "a report does not take it away"
    set_growth(**{job_id.replace("-", "_"): 1}, now=22.0)
    assert store.get_job(job_id).status.held_back is None


def test_numbers_are_written_again_only_now_and_then(
    store: Store, submit: Submit, begin: Begin, set_growth: SetGrowth
) -> None:
    job_id = submit()
    begin(job_id)
    for now, decided_at in ((10.0, 10.0), (11.0, 10.0), (10.0 + REWRITE_S, 10.0 + REWRITE_S)):
        set_growth(held(job_id, reason=f"It ends at {now}."), now=now)
        answer = store.get_job(job_id).status.held_back
        assert answer is not None and answer.decided_at == decided_at


def test_without_the_lease_nothing_is_written(store: Store, submit: Submit, begin: Begin, lease: Lease) -> None:
    job_id = submit()
    begin(job_id)
    with pytest.raises(LeaseLost):
        store.writing(queueing.save_growth, lease.epoch - 1)([held(job_id)], {job_id: 1}, now=10.0)
    assert store.get_job(job_id).status.held_back is None
