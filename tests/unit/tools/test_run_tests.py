"""Which failed tests `make test` runs again, and what it makes of the second result."""

import datetime
import tomllib

from run_tests import AFTERWARDS, KNOWN_FLAKES, ROOT, to_repeat, verdict

_FLAKE = {"reason": "waits for a page", "since": datetime.date(2026, 11, 28)}


def test_few_failed_tests_are_run_again_once_each() -> None:
    assert to_repeat({1}, ["a.py::test_a", "b.py::test_b", "a.py::test_a"]) == ["a.py::test_a", "b.py::test_b"]


def test_nothing_is_run_again_if_all_succeeded_or_something_is_broken() -> None:
    assert to_repeat(set(), []) == []
    assert to_repeat({1}, [f"a.py::test_{number}" for number in range(16)]) == []
    assert to_repeat({1, 2}, ["a.py::test_a"]) == [], "a process could not collect its tests, or was interrupted"
    assert to_repeat({1}, ["a.py::test_a", AFTERWARDS]) == [], "a test has left something"


def test_a_test_that_passes_alone_fails_the_run_and_is_named() -> None:
    status, [line] = verdict(["a.py::test_a"], [], {})
    assert status == 1
    assert line.startswith("== FLAKY: a.py::test_a failed beside others and passed alone, which fails this run.")
    assert "tests/known_flakes.toml" in line
    status, [line] = verdict(["a.py::test_a"], [], {}, flakes_fail=False)
    assert status == 0 and line.startswith("== FLAKY: a.py::test_a failed beside others and passed alone. Mend")


def test_a_known_flake_that_passes_alone_is_named_and_fails_nothing() -> None:
    known = {"a.py::test_a": _FLAKE}
    assert verdict(["a.py::test_a"], [], known) == (
        0,
        ["== known flake since 2026-11-28 (waits for a page): a.py::test_a"],
    )
    assert verdict(["a.py::test_a"], ["a.py::test_a"], known) == (1, ["== failed, also alone: a.py::test_a"])


def test_every_known_flake_has_a_reason_and_a_date_and_exists() -> None:
    for test, flake in tomllib.loads(KNOWN_FLAKES.read_text(encoding="utf-8")).items():
        assert flake["reason"] and isinstance(flake["since"], datetime.date), test
        file, name = test.split("[")[0].split("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{test} is no test any more"
