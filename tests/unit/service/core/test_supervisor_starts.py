"""A supervisor that never records its start is not started without limit."""

from __future__ import annotations

from shoal_service.core.supervisor_starts import (
    MAX_FAILED_STARTS,
    MAX_UNRECORDED_STARTS,
    after_failure,
    while_unanswered,
)


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
