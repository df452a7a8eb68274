"""docs/recovery.md: the tests that prove the orders of events are there, and are part of `make test`."""

import ast
import re

from kit.cases import failed_cases
from kit.sources import ROOT

SECTION = (ROOT / "docs" / "recovery.md").read_text(encoding="utf-8").split("## Orders of events")[1].split("\n## ")[0]
ROWS = [line for line in SECTION.splitlines() if re.match(r"\| \d+ \|", line)]


def test_there_are_twelve_of_them() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == list(range(1, 13))


def test_each_order_of_events_has_tests_that_make_test_runs() -> None:
    assert failed_cases(_check_row, ROWS) == {}


def _check_row(row: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
    assert named and len(named) == row.count("tests/"), "each as `file::test`"
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        assert found, f"{file}::{name} is not there"
        marks = " ".join(ast.unparse(mark) for mark in found[0].decorator_list)
        assert not re.search(r"\b(slow|matrix|soak|skip)", marks), f"{name} is not run by make test: {marks}"
