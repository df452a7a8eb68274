"""Requests for profiles and their ends, on both databases."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.endings import AttemptEnd
from shoal_service.store import Store, driving, histories, supervisor_links
from shoal_service.store.errors import ProfileOpen
from shoal_service.store.supervisor_links import UNANSWERED_S
from shoal_service.views import ProfileBody, ProfileState
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.profiles import KEPT_PROFILES, Category, Profiled, ProfileFile, ProfileRequest, StepTimes

Submit = Callable[..., str]
Begin = Callable[..., Any]
BODY = ProfileBody(steps=2, rank=1)
RESULT = Profiled(
    generation=3,
    number=1,
    rank=1,
    times=(StepTimes(step=41, seconds={Category.COMPUTE: 0.5, Category.DATA: 0.5}),),
    files=(ProfileFile(name="trace-rank1-g3.json.gz", bytes=9),),
    held_s=0.1,
)


def _types(store: Store, job_id: str) -> list[str]:
    return [event.type for event in store.reading(histories.read_events)(job_id) if event.type.startswith("profile.")]


def test_a_request_is_passed_to_the_attempt_until_its_result_is_stored(store: Store, job_id: str, attempt: Any) -> None:
    asked = store.writing(supervisor_links.create)(job_id, BODY, now=50.0)
    assert (asked.number, asked.state, asked.rank, asked.steps) == (1, ProfileState.REQUESTED, 1, 2)
    [row] = store.reading(driving.to_drive)()
    assert row.profile == ProfileRequest(number=1, rank=1, steps=2, requested_at=50.0)
    with pytest.raises(ProfileOpen, match=r"Profile 1 of job .* is being taken"):
        store.writing(supervisor_links.create)(job_id, BODY, now=51.0)
    attempt.report(profiles=(RESULT,))
    attempt.report(profiles=(RESULT.model_copy(update={"times": ()}),))
    view = store.reading(supervisor_links.view)(job_id, 1)
    assert (view.state, view.generation, view.files, view.step_s) == (ProfileState.DONE, 3, RESULT.files, 1.0)
    assert view.times == RESULT.times, "the first end counts"
    assert store.reading(driving.to_drive)()[0].profile is None
    assert _types(store, job_id) == ["profile.requested", "profile.taken"]
    assert store.writing(supervisor_links.create)(job_id, BODY, now=60.0).number == 2


def test_a_failed_profile_keeps_its_reason(store: Store, job_id: str, attempt: Any) -> None:
    store.writing(supervisor_links.create)(job_id, BODY, now=50.0)
    attempt.report(profiles=(Profiled(generation=3, number=1, rank=1, error="the worker was lost"),))
    view = store.reading(supervisor_links.view)(job_id, 1)
    assert (view.state, view.reason) == (ProfileState.FAILED, "the worker was lost")
    assert _types(store, job_id) == ["profile.requested", "profile.failed"]


def test_the_end_of_the_attempt_ends_an_open_request_and_keeps_a_result_that_comes_with_it(
    store: Store, submit: Submit, begin: Begin
) -> None:
    end = AttemptEnd(reason=EndReason.FINISHED, message="done", step=10)
    for profiles, state in (((), ProfileState.FAILED), ((RESULT,), ProfileState.DONE)):
        job_id = submit()
        attempt = begin(job_id)
        store.writing(supervisor_links.create)(job_id, BODY, now=50.0)
        attempt.report(profiles=profiles, end=end)
        assert store.reading(supervisor_links.view)(job_id, 1).state is state
    assert len(_types(store, job_id)) == 2


def test_a_request_that_nobody_answers_is_given_up_when_the_next_one_comes(
    store: Store, begin: Begin, job_id: str
) -> None:
    begin(job_id)
    store.writing(supervisor_links.create)(job_id, BODY, now=50.0)
    second = store.writing(supervisor_links.create)(job_id, BODY, now=50.0 + UNANSWERED_S)
    assert second.number == 2
    assert "no answer within" in store.reading(supervisor_links.view)(job_id, 1).reason
    row = store.reading(driving.to_drive)()[0]
    assert row.profile is not None and row.profile.number == 2


def test_the_newest_profiles_are_kept(store: Store, job_id: str, attempt: Any) -> None:
    for number in range(1, KEPT_PROFILES + 3):
        store.writing(supervisor_links.create)(job_id, BODY, now=50.0)
        attempt.report(profiles=(RESULT.model_copy(update={"number": number}),))
    assert [view.number for view in store.reading(supervisor_links.views)(job_id)] == list(range(3, KEPT_PROFILES + 3))
