from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.endings import ENDINGS, FailureRecord, Retry, decide_retry
from shoal_workers.contract.job import EndReason, JobState

BUDGETED = [reason for reason, ending in ENDINGS.items() if ending.retry is Retry.BUDGET]


def test_every_reason_has_an_ending_and_every_ending_words() -> None:
    assert set(ENDINGS) == set(EndReason)
    for ending in ENDINGS.values():
        assert ending.words.endswith(".")
        assert ending.state.ended or ending.state is JobState.PAUSED


def test_only_failures_of_the_job_itself_are_charged() -> None:
    assert set(BUDGETED) == {EndReason.USER_ERROR, EndReason.NON_FINITE, EndReason.INTERNAL}


@pytest.mark.parametrize("reason", BUDGETED)
def test_an_error_before_a_step_is_done_is_final_whatever_the_budget(reason: EndReason) -> None:
    decision = decide_retry(reason, 0, FailureRecord(0, 0, 1000))
    assert not decision.again
    assert "no step was made since the start" in decision.reason


def test_progress_since_the_last_failure_earns_another_attempt_while_the_budget_lasts() -> None:
    record = FailureRecord(failures=1, last_step=40, max_failures=2)
    assert decide_retry(EndReason.USER_ERROR, 41, record).again
    assert not decide_retry(EndReason.USER_ERROR, 40, record).again
    spent = decide_retry(EndReason.USER_ERROR, 90, FailureRecord(2, 40, 2))
    assert not spent.again
    assert "retry.max_failures 2 is used up" in spent.reason


@pytest.mark.parametrize("reason", [EndReason.CLUSTER_LOST, EndReason.SUPERVISOR_LOST])
def test_a_loss_that_is_not_the_jobs_fault_is_free(reason: EndReason) -> None:
    decision = decide_retry(reason, 0, FailureRecord(9, 9, 0))
    assert (decision.again, decision.charged) == (True, False)


@given(st.lists(st.tuples(st.sampled_from(BUDGETED), st.integers(0, 50)), min_size=30, max_size=60), st.integers(0, 10))
def test_no_sequence_of_failures_is_retried_more_often_than_the_budget(
    failures: list[tuple[EndReason, int]], budget: int
) -> None:
    record = FailureRecord(0, 0, budget)
    retries = 0
    for reason, step in failures:
        decision = decide_retry(reason, step, record)
        if not decision.again:
            break
        retries += 1
        record = FailureRecord(record.failures + 1, step, budget)
    assert retries <= budget
