"""`make faults`: how a source text is changed, what a probe records, and how a run goes on from its file."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

import faults_page
from injected_faults.changes import Fault, Kind, draw_faults, is_change, list_changes
from injected_faults.reach import add_probes
from injected_faults.results import append_result, format_tables, make_result, read_results
from injected_faults.sources import ROOMS, ROOT, iterate_statements
from injected_faults.trials import How, Judgement, Run

SOURCE = '''"""A module."""
from __future__ import annotations

LIMIT = 3


def count(values, limit=LIMIT):
    """Ünïcode before a change: columns are bytes."""
    total = 0
    for n in range(limit):
        if values[n] <= limit and not values[n] == 0:  # a <= comment and more
            total += add("ä", n)
        elif (values[n]) is not None:
            raise ValueError(f"{values[n] < 3}")
    assert total < 5
    return values[: total]


async def wait(event):
    while True:
        try:
            await event.wait(1.5, True)
        except OSError:
            return
        finally:
            event.done = True
'''


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_fault_changes_the_text_between_two_positions_and_still_parses(kind: Kind) -> None:
    faults = [fault for fault in list_changes("module.py", SOURCE) if fault.kind is kind]
    assert faults
    for fault in faults:
        changed = fault.apply(SOURCE)
        assert changed.startswith(SOURCE[: fault.start]) and changed.endswith(SOURCE[fault.end :])
        assert is_change(SOURCE, fault), fault
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))


def test_these_are_the_changes() -> None:
    changes = {fault.describe(SOURCE)[1] for fault in list_changes("module.py", SOURCE)}
    head = "# a <= comment and more"
    assert changes == {
        "total = 1",
        "for n in range((limit) + 1):",
        f"if values[n] > limit and not values[n] == 0: {head}",
        f"if values[n] < limit and not values[n] == 0: {head}",
        f"if values[n] <= limit or not values[n] == 0: {head}",
        f"if values[n] <= limit and values[n] == 0: {head}",
        f"if values[n] <= limit and not values[n] != 0: {head}",
        f"if values[n] <= limit and not values[n] == 1: {head}",
        'total += add(n, "ä")',
        "pass",
        "elif (values[n]) is None:",
        "return values[: (total) + 1]",
        "while False:",
        "await event.wait(2.5, True)",
        "await event.wait(1.5, False)",
        "await event.wait(True, 1.5)",
        "event.done = False",
    }


def test_a_change_without_effect_on_the_program_is_none() -> None:
    twice = Fault(path="m.py", kind=Kind.SWAPPED, statement=0, line=1, start=0, end=4, replacement="a(1)")
    assert not is_change("a(1)\n", twice)
    assert not is_change("a(1)\n", Fault(**{**vars(twice), "replacement": "a("}))


def test_the_same_seed_draws_the_same_faults_each_in_a_statement_of_its_own() -> None:
    room = ROOMS[-3]
    first, again, other = ([*islice(draw_faults(room, seed), 8)] for seed in (1, 1, 2))
    assert first == again != other
    assert len({(fault.path, fault.statement) for fault in first}) == 8
    assert {fault.kind for fault in first[:6]} == set(Kind)
    assert all(fault.path.startswith(f"{room}/") for fault in first)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytearray]:
    probes = types.ModuleType("shoal_workers.statement_probes")
    probes.reached = bytearray(100)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, probes.__name__, probes)
    yield probes.reached


def test_a_probe_stands_before_each_statement_inside_a_function(reached: bytearray) -> None:
    names: dict[str, object] = {"add": lambda text, n: n}
    exec(compile(add_probes(SOURCE, 10), "module.py", "exec"), names)
    assert not any(reached)
    names["count"]([1, 9], 1)  # type: ignore[operator]
    statements = [ast.unparse(statement).split("\n")[0] for statement in iterate_statements(ast.parse(SOURCE))]
    texts = [statements[n - 10] for n, is_set in enumerate(reached) if is_set]
    assert texts == [
        "total = 0",
        "for n in range(limit):",
        "if values[n] <= limit and (not values[n] == 0):",
        "total += add('ä', n)",
        "assert total < 5",
        "return values[:total]",
    ]


def test_probes_leave_every_module_a_program(reached: bytearray) -> None:
    for path in (ROOT / ROOMS[0]).rglob("*.py"):
        compile(add_probes(path.read_text(encoding="utf-8"), 0), str(path), "exec")


def _write(path: Path, fault: Fault, caught: str) -> None:
    judgement = Judgement(caught, Run(How.FAILED if caught == "first" else How.PASSED, "tests/unit/a.py::test_b", 2.0))
    append_result(path, make_result(fault, SOURCE, seed=1, room=ROOMS[0], num_tests=3, judgement=judgement))


def test_the_last_trial_of_a_fault_counts(tmp_path: Path) -> None:
    out = tmp_path / "build" / "faults.jsonl"
    first, second = list_changes("module.py", SOURCE)[:2]
    _write(out, first, "none")
    _write(out, second, "first")
    assert [result.caught for result in read_results(out)] == ["none", "first"]
    assert f"| {ROOMS[0]} | 2 | 1 | 0 | 0 | 0 | 1 | 0 |" in format_tables(read_results(out))
    _write(out, first, "first")
    assert [(result.key, result.caught) for result in read_results(out)] == [
        (first.key, "first"),
        (second.key, "first"),
    ]


def test_the_page_shows_the_committed_results() -> None:
    page = faults_page.PAGE.read_text(encoding="utf-8")
    assert faults_page.with_tables(page, read_results(faults_page.RESULTS)) == page
