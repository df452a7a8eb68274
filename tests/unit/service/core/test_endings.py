import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.endings import ENDINGS, REPEATED, FailureRecord, Retry, decide_retry
from shoal_workers.contract.job import EndReason, JobState

BUDGETED = [reason for reason, ending in ENDINGS.items() if ending.retry is Retry.BUDGET]


def test_every_end_reason_has_an_ending_with_words() -> None:
    assert set(ENDINGS) == set(EndReason)
    for ending in ENDINGS.values():
        assert ending.words.endswith(".")
        assert ending.state.ended or ending.state is JobState.PAUSED


def test_only_failures_of_the_job_itself_are_charged() -> None:
    assert set(BUDGETED) == {
        EndReason.USER_ERROR,
        EndReason.NON_FINITE,
        EndReason.WORKERS_FAILED,
        EndReason.INTERNAL,
    }


@pytest.mark.parametrize("reason", BUDGETED)
def test_an_error_before_the_first_completed_step_is_final(reason: EndReason) -> None:
    decision = decide_retry(reason, 0, FailureRecord(0, 0, 1000))
    assert not decision.again
    assert "no step was completed" in decision.reason


def test_after_progress_another_attempt_follows_until_the_budget_is_used_up() -> None:
    record = FailureRecord(failures=1, last_step=40, max_failures=2)
    assert decide_retry(EndReason.USER_ERROR, 41, record).again
    assert not decide_retry(EndReason.USER_ERROR, 40, record).again
    spent = decide_retry(EndReason.USER_ERROR, 90, FailureRecord(2, 40, 2))
    assert not spent.again
    assert "retry.max_failures 2 is used up" in spent.reason


def test_a_mistake_is_said_of_what_made_it() -> None:
    record = FailureRecord(0, 0, 2)
    of_task = decide_retry(EndReason.USER_ERROR, 0, record, mistake="refused").reason
    of_script = decide_retry(EndReason.USER_ERROR, 0, record, mistake="exit_status").reason
    assert of_task.startswith("The task cannot be trained as it is. Not retried")
    assert of_script.startswith("The script has failed. Not retried")


@pytest.mark.parametrize("reason", [EndReason.CLUSTER_LOST, EndReason.SUPERVISOR_LOST])
def test_an_end_that_the_job_did_not_cause_is_not_charged(reason: EndReason) -> None:
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


def test_a_script_that_has_run_for_long_is_tried_again_without_a_step() -> None:
    record = FailureRecord(failures=0, last_step=0, max_failures=2)
    decision = decide_retry(EndReason.USER_ERROR, 0, record, has_run_long=True)
    assert decision.again and "after a minute or more" in decision.reason
    spent = FailureRecord(failures=2, last_step=0, max_failures=2)
    assert not decide_retry(EndReason.USER_ERROR, 0, spent, has_run_long=True).again


def test_an_end_that_repeats_itself_is_final_whatever_the_budget_is() -> None:
    record = FailureRecord(failures=0, last_step=0, max_failures=5)
    decision = decide_retry(EndReason.USER_ERROR, 15, record, mistake=REPEATED, has_run_long=True)
    assert (decision.again, decision.charged) == (False, True)
    assert decision.reason == "No other attempt: it would end in the same way again."


def test_the_last_allowed_retry_is_said_as_one() -> None:
    decision = decide_retry(EndReason.USER_ERROR, 40, FailureRecord(failures=1, last_step=20, max_failures=2))
    assert decision.again and decision.reason.endswith("retry 2 of at most 2, 20 steps completed since the last.")
