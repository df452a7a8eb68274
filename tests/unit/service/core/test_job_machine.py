"""The states of a job, the ends of its attempts, the starts of its supervisor, and the changes of its workers."""

from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.desired import Desired
from shoal_service.core.endings import ENDINGS, REPEATED, AttemptEnd, FailureRecord, Retry, decide_retry
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
from shoal_service.core.supervisor_starts import (
    MAX_FAILED_STARTS,
    MAX_UNRECORDED_STARTS,
    ProcessEnd,
    after_failure,
    describe_lack_of_memory,
    while_unanswered,
)
from shoal_service.core.worker_changes import FRESH_S, Change, ChangeKind, connected
from shoal_workers.contract.job import EndReason, JobState, UserFailure

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


def left(job: str, at: float, workers: int, cluster: str = "") -> Change:
    return Change(at=at, job=job, kind=ChangeKind.LEAVE, before=workers, after=0, cluster=cluster)


def grew(job: str, at: float, workers: int, others: tuple[tuple[str, int], ...] = (), cluster: str = "") -> Change:
    return Change(at=at, job=job, kind=ChangeKind.GROW, before=1, after=1 + workers, others=others, cluster=cluster)


def test_a_job_grows_because_another_one_has_ended() -> None:
    gone, grown = connected([grew("b", 12.0, 3), left("a", 10.0, 4)])
    assert (gone.job, gone.free, gone.taken_by) == ("a", 4, (("b", 3),))
    assert (grown.free, grown.freed_by) == (3, (("a", 3),))


def test_workers_that_were_left_go_to_one_job_once() -> None:
    _, first, second = connected([left("a", 10.0, 4), grew("b", 11.0, 3), grew("c", 12.0, 3)])
    assert first.freed_by == (("a", 3),) and second.freed_by == (("a", 1),), "the other two were free before"


def test_what_a_job_gives_by_a_decision_is_not_free() -> None:
    gone, grown = connected([left("a", 10.0, 4), grew("b", 11.0, 3, others=(("c", 3),))])
    assert grown.free == 0 and grown.freed_by == () and gone.taken_by == ()


def test_the_newest_workers_go_first_and_old_ones_have_no_giver() -> None:
    at = 10.0 + FRESH_S + 1
    _, _, grown = connected([left("a", 10.0, 4), left("b", at, 1), grew("c", at + 1, 3)])
    assert grown.freed_by == (("b", 1),)


def test_workers_stay_in_their_cluster() -> None:
    _, grown = connected([left("a", 10.0, 4, "east"), grew("b", 11.0, 2, cluster="west")])
    assert grown.freed_by == () and grown.free == 2


def test_an_incident_frees_no_worker() -> None:
    lost = Change(at=10.0, job="a", kind=ChangeKind.LOST, before=4, after=2)
    _, grown = connected([lost, grew("b", 11.0, 2)])
    assert lost.free == 0 and grown.freed_by == ()


def test_the_pauses_between_failed_starts_double_and_the_last_failure_is_final() -> None:
    decisions = [after_failure(number, "no such module") for number in range(1, MAX_FAILED_STARTS + 1)]
    assert [one.after_s for one in decisions] == [1.0, 2.0, 4.0, 8.0, 0.0]
    assert [one.again for one in decisions] == [True] * 4 + [False]
    assert all("no such module" in one.reason for one in decisions)


def test_the_process_that_is_starting_now_does_not_count_as_dead() -> None:
    assert while_unanswered(MAX_UNRECORDED_STARTS, 0).again
    decision = while_unanswered(MAX_UNRECORDED_STARTS + 1, 0)
    assert not decision.again and f"died {MAX_UNRECORDED_STARTS} times" in decision.reason


def test_what_was_not_recorded_before_the_last_answer_is_forgiven() -> None:
    assert while_unanswered(100 + MAX_UNRECORDED_STARTS, 100).again
    assert not while_unanswered(101 + MAX_UNRECORDED_STARTS, 100).again


KILLED = ProcessEnd(
    True,
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7, ID: fa53) was "
    "22.90GB used / 23.54GB limit (0.972812)\nOOM kill reason: Memory usage 24588910592B exceeded threshold of "
    "24012676915B (95.0% of 25276502016B limit)\nObject store memory usage: ...",
)
OTHER = ProcessEnd(False, "Worker unexpectedly exits with a connection error code 2. End of file.")


def test_the_words_for_lack_of_memory_name_the_node_its_memory_and_what_to_do() -> None:
    words = describe_lack_of_memory([KILLED] * 7 + [OTHER])
    assert "killed 7 of its last 8 processes" in words and "node 10.0.0.7 had no memory left" in words
    assert "(22.90 of 23.54 GB in use, Ray allows 95.0 %)" in words
    assert "worker.memory_gib" in words and "shoal drain" in words


def test_other_deaths_are_not_explained_by_memory() -> None:
    assert describe_lack_of_memory([]) == "" and describe_lack_of_memory([OTHER] * 4 + [KILLED] * 4) == ""
    assert "had no memory left." in describe_lack_of_memory([ProcessEnd(True, "other words")]), (
        "of another release of Ray"
    )


BUDGETED = [reason for reason, ending in ENDINGS.items() if ending.retry is Retry.BUDGET]


def test_every_end_reason_has_an_ending_with_words() -> None:
    assert set(ENDINGS) == set(EndReason)
    for ending in ENDINGS.values():
        assert ending.message.endswith(".")
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
    for reason, failed_step in failures:
        decision = decide_retry(reason, failed_step, record)
        if not decision.again:
            break
        retries += 1
        record = FailureRecord(record.failures + 1, failed_step, budget)
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
    assert decision.reason == "Not retried: it would end in the same way again."


def test_the_last_allowed_retry_is_said_as_one() -> None:
    decision = decide_retry(EndReason.USER_ERROR, 40, FailureRecord(failures=1, last_step=20, max_failures=2))
    assert decision.again and decision.reason.endswith("retry 2 of at most 2, 20 steps completed since the last.")


@pytest.mark.parametrize(
    ("said", "mistake", "message", "sentence"),
    [
        ("the rank of A is 2", "", "E: the rank of A is 2", "E: the rank of A is 2, on ranks 3, 5."),
        ("status 2.", "exit_status", "status 2.", "status 2, on ranks 3, 5."),
        ("Set model.path.", "refused", "Set model.path.", "Set model.path."),
        ("m", "", "E: m, on rank 3. Before, others had ended.", "E: m, on rank 3. Before, others had ended."),
    ],
)
def test_the_ranks_are_named_behind_what_the_failure_says(said: str, mistake: str, message: str, sentence: str) -> None:
    failure = UserFailure(type="E", message=said, traceback="", phase="forward", ranks=(3, 5), step=1, mistake=mistake)
    assert AttemptEnd(reason=EndReason.USER_ERROR, message=message, step=1, failure=failure).sentence == sentence
