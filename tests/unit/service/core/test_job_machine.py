from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.desired import Desired
from shoal_service.core.endings import ENDINGS
from shoal_service.core.job_machine import (
    ACTIVE,
    ATTEMPT_STATES,
    AttemptBegun,
    AttemptEnded,
    JobInput,
    JobStanding,
    Reopened,
    Reported,
    Requested,
    Requeued,
    step,
)
from shoal_workers.contract.job import EndReason, JobState

INPUTS: list[JobInput] = [
    *(Requested(desired) for desired in Desired),
    AttemptBegun(),
    *(Reported(state) for state in JobState),
    *(AttemptEnded(reason, again) for reason in EndReason for again in (False, True)),
    Requeued(),
    Reopened(),
]
STANDINGS = [JobStanding(state, desired) for state, desired in product(JobState, Desired)]


NEW_JOB = JobStanding(JobState.QUEUED, Desired.RUN)


def _reachable(start: JobStanding = NEW_JOB) -> set[JobStanding]:
    found, left = {start}, [start]
    while left:
        standing = left.pop()
        for event in INPUTS:
            after = step(standing, event)
            if after is not None and after not in found:
                found.add(after)
                left.append(after)
    return found


def test_every_input_has_an_answer_in_every_standing() -> None:
    for standing, event in product(STANDINGS, INPUTS):
        after = step(standing, event)
        assert after is None or isinstance(after, JobStanding)


def test_every_state_can_be_reached_and_every_job_can_still_end() -> None:
    reachable = _reachable()
    assert {standing.state for standing in reachable} == set(JobState)
    for standing in reachable:
        assert any(after.state.ended for after in _reachable(standing)), standing


def test_an_ended_job_changes_only_if_it_is_reopened() -> None:
    for standing, event in product(STANDINGS, INPUTS):
        if standing.state.ended and isinstance(event, Reopened):
            assert step(standing, event) == NEW_JOB
        elif standing.state.ended:
            after = step(standing, event)
            assert after is None or after.state is standing.state


def test_what_waits_in_the_queue_wants_to_run_and_what_is_paused_does_not() -> None:
    desired_of: dict[JobState, set[Desired]] = {}
    for standing in _reachable():
        desired_of.setdefault(standing.state, set()).add(standing.desired)
    assert desired_of[JobState.QUEUED] == {Desired.RUN}
    assert desired_of[JobState.PAUSED] == {Desired.PAUSE}
    assert desired_of[JobState.CANCELLING] == {Desired.CANCEL}
    for state in ACTIVE:
        assert desired_of[state] == {Desired.RUN}


def test_reports_without_an_attempt_are_refused() -> None:
    for standing, state in product(STANDINGS, JobState):
        if standing.state not in ATTEMPT_STATES:
            assert step(standing, Reported(state)) is None


def test_a_report_never_ends_or_queues_a_job() -> None:
    for standing, state in product(STANDINGS, JobState):
        after = step(standing, Reported(state))
        assert after is None or after.state in ATTEMPT_STATES


def test_only_a_queued_job_can_begin_an_attempt() -> None:
    begun = {standing.state for standing in STANDINGS if step(standing, AttemptBegun()) is not None}
    assert begun == {JobState.QUEUED}


@pytest.mark.parametrize("reason", list(EndReason))
def test_without_a_retry_the_reason_decides_the_final_state(reason: EndReason) -> None:
    after = step(JobStanding(JobState.RUNNING, Desired.RUN), AttemptEnded(reason, again=False))
    expected = ENDINGS[reason].state
    assert after is not None
    assert after.state is (JobState.QUEUED if expected is JobState.PAUSED else expected)


def test_a_retry_leads_to_the_state_that_the_user_requested() -> None:
    ended = AttemptEnded(EndReason.INTERNAL, again=True)
    assert step(JobStanding(JobState.RUNNING, Desired.RUN), ended) == JobStanding(JobState.QUEUED, Desired.RUN)
    assert step(JobStanding(JobState.PAUSING, Desired.PAUSE), ended) == JobStanding(JobState.PAUSED, Desired.PAUSE)
    assert step(JobStanding(JobState.CANCELLING, Desired.CANCEL), ended) == JobStanding(
        JobState.CANCELLED, Desired.CANCEL
    )


def test_a_resume_overtakes_a_pause_that_is_being_carried_out() -> None:
    standing = _run([Requested(Desired.PAUSE), Requested(Desired.RUN)], JobStanding(JobState.RUNNING, Desired.RUN))
    assert standing == JobStanding(JobState.PAUSING, Desired.RUN)
    assert step(standing, AttemptEnded(EndReason.PAUSED, again=False)) == JobStanding(JobState.QUEUED, Desired.RUN)
    assert step(standing, Reported(JobState.RUNNING)) == JobStanding(JobState.RUNNING, Desired.RUN)


@given(st.lists(st.sampled_from(INPUTS), max_size=30))
def test_a_cancel_is_never_forgotten(inputs: list[JobInput]) -> None:
    standing = _run(inputs, JobStanding(JobState.QUEUED, Desired.RUN))
    cancelled = step(standing, Requested(Desired.CANCEL))
    if cancelled is None:
        assert standing.state.ended
        return
    after = _run([event for event in inputs if not isinstance(event, Reopened)], cancelled)
    assert after.desired is Desired.CANCEL
    assert after.state is JobState.CANCELLING or after.state.ended


@given(st.lists(st.sampled_from(INPUTS), max_size=40))
def test_repeating_a_request_changes_nothing(inputs: list[JobInput]) -> None:
    standing = _run(inputs, JobStanding(JobState.QUEUED, Desired.RUN))
    for desired in Desired:
        once = step(standing, Requested(desired))
        if once is not None:
            assert step(once, Requested(desired)) == once


def _run(inputs: Iterable[JobInput], standing: JobStanding) -> JobStanding:
    for event in inputs:
        standing = step(standing, event) or standing
    return standing
