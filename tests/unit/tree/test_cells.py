"""Which cells of a test `make test` runs."""

from __future__ import annotations

import pytest

from kit.cells import FEW, leave_out_most


class Cell:
    """As much of a pytest.Item as the choice looks at."""

    def __init__(self, name: str, *marks: str, cells: int | None = None) -> None:
        self.nodeid = f"tests/test_x.py::{name}"
        self.marks = {mark: getattr(pytest.mark, mark).mark for mark in marks}
        if cells is not None:
            self.marks["cells"] = pytest.mark.cells(cells).mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, decorator: pytest.MarkDecorator) -> None:
        self.marks[decorator.name] = decorator.mark


def chosen(folder: str, cells: list[Cell]) -> list[str]:
    leave_out_most([(folder, cell) for cell in cells])  # type: ignore[misc]
    return [cell.nodeid.split("::")[1] for cell in cells if "matrix" not in cell.marks]


def test_the_first_the_last_and_those_between_are_run() -> None:
    assert chosen("http", [Cell(f"test_a[{at}]") for at in range(9)]) == ["test_a[0]", "test_a[4]", "test_a[8]"]
    assert FEW["http"] == 3


def test_a_test_with_few_cells_or_none_keeps_them() -> None:
    assert chosen("dist", [Cell("test_a"), Cell("test_b[0]"), Cell("test_b[1]")]) == [
        "test_a",
        "test_b[0]",
        "test_b[1]",
    ]


def test_each_test_is_counted_alone() -> None:
    cells = [Cell(f"test_{name}[{at}]") for name in "ab" for at in range(5)]
    assert chosen("dist", cells) == ["test_a[0]", "test_a[4]", "test_b[0]", "test_b[4]"]


def test_one_database_is_enough_outside_of_the_store() -> None:
    both = [Cell("test_a[sqlite]"), Cell("test_a[postgres]", "postgres"), Cell("test_b[postgres]", "postgres")]
    assert chosen("http", both) == ["test_a[sqlite]", "test_b[postgres]"]


def test_marks_of_the_test_itself_count() -> None:
    assert len(chosen("dist", [Cell(f"test_a[{at}]", cells=4) for at in range(4)])) == 4
    assert chosen("unit", [Cell(f"test_a[{at}]", cells=1) for at in range(4)]) == ["test_a[0]"]
    cells = [Cell("test_a[0]", "matrix"), Cell("test_a[1]"), Cell("test_a[2]")]
    assert chosen("dist", cells) == ["test_a[1]", "test_a[2]"]


def test_other_folders_run_all() -> None:
    assert len(chosen("store", [Cell(f"test_a[{at}]") for at in range(9)])) == 9
