"""Which failed tests `make test` runs again, alone."""

from __future__ import annotations

from run_tests import AFTERWARDS, to_repeat


def test_few_failed_tests_are_run_again_once_each() -> None:
    assert to_repeat({1}, ["a.py::test_a", "b.py::test_b", "a.py::test_a"]) == ["a.py::test_a", "b.py::test_b"]


def test_nothing_is_run_again_if_all_succeeded_or_something_is_broken() -> None:
    assert to_repeat(set(), []) == []
    assert to_repeat({1}, [f"a.py::test_{number}" for number in range(6)]) == []
    assert to_repeat({1, 2}, ["a.py::test_a"]) == [], "a process could not collect its tests, or was interrupted"
    assert to_repeat({1}, ["a.py::test_a", AFTERWARDS]) == [], "a test has left something"
