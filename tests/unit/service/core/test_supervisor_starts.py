"""A supervisor that never records its start is not started without limit."""

from shoal_service.core.supervisor_starts import (
    MAX_FAILED_STARTS,
    MAX_UNRECORDED_STARTS,
    ProcessEnd,
    after_failure,
    lack_of_memory,
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


KILLED = ProcessEnd(
    True,
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7, ID: fa53) was "
    "22.90GB used / 23.54GB limit (0.972812)\nOOM kill reason: Memory usage 24588910592B exceeded threshold of "
    "24012676915B (95.0% of 25276502016B limit)\nObject store memory usage: ...",
)
OTHER = ProcessEnd(False, "Worker unexpectedly exits with a connection error code 2. End of file.")


def test_the_words_for_lack_of_memory_name_the_node_its_memory_and_what_to_do() -> None:
    words = lack_of_memory([KILLED] * 7 + [OTHER])
    assert "killed 7 of its last 8 processes" in words and "node 10.0.0.7 had no memory left" in words
    assert "(22.90 of 23.54 GB in use, Ray allows 95.0 %)" in words
    assert "worker.memory_gib" in words and "shoal drain" in words


def test_other_deaths_are_not_explained_by_memory() -> None:
    assert lack_of_memory([]) == "" and lack_of_memory([OTHER] * 4 + [KILLED] * 4) == ""
    assert "had no memory left." in lack_of_memory([ProcessEnd(True, "other words")]), "of another release of Ray"
