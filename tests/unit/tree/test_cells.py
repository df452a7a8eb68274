"""Which cells of a test `make test` and `make test-slow` run."""

import pytest

from kit.cells import FEW, MORE, leave_out_most


class Cell:
    """As much of a pytest.Item as the choice looks at."""

    def __init__(self, name: str, *marks: str, cells: tuple[int, ...] | None = None, module: str = "test_x") -> None:
        self.nodeid = f"tests/{module}.py::{name}"
        self.marks = {mark: getattr(pytest.mark, mark).mark for mark in marks}
        if cells is not None:
            self.marks["cells"] = pytest.mark.cells(*cells).mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, decorator: pytest.MarkDecorator) -> None:
        self.marks[decorator.name] = decorator.mark


def chosen(folder: str, cells: list[Cell], *, slow: bool = False) -> list[str]:
    """`slow`: also what `make test-slow` runs."""
    leave_out_most([(folder, cell) for cell in cells])  # type: ignore[misc]
    left_out = {"matrix"} if slow else {"matrix", "slow"}
    return [cell.nodeid.split("::")[1] for cell in cells if not left_out & set(cell.marks)]


def test_the_first_is_run_and_those_with_the_most_new_pairs_of_values() -> None:
    cells = [Cell(f"test_a[{model} {layout}-{dtype}]") for model in "ab" for layout in "cd" for dtype in "ef"]
    assert chosen("http", cells) == ["test_a[a c-e]", "test_a[b d-f]"]
    assert chosen("http", cells, slow=True) == ["test_a[a c-e]", "test_a[a c-f]", "test_a[b d-f]"]
    assert (FEW["http"], MORE["http"]) == (2, 3)


def test_a_test_with_few_cells_or_none_keeps_them() -> None:
    cells = [Cell("test_a"), Cell("test_b[0]"), Cell("test_b[1]")]
    assert chosen("http", cells) == ["test_a", "test_b[0]", "test_b[1]"]


def test_each_test_is_counted_alone() -> None:
    cells = [Cell(f"test_{name}[{at}]") for name in "ab" for at in range(5)]
    assert chosen("http", cells) == ["test_a[0]", "test_a[1]", "test_b[0]", "test_b[1]"]


def test_one_database_is_enough_outside_of_the_store() -> None:
    both = [Cell("test_a[sqlite]"), Cell("test_a[postgres]", "postgres"), Cell("test_b[postgres]", "postgres")]
    assert chosen("http", both) == ["test_a[sqlite]", "test_b[postgres]"]


def test_a_costly_folder_runs_what_is_marked_first() -> None:
    cells = [Cell("test_a", module="ray/test_x"), Cell("test_b", "first", module="ray/test_x")]
    assert chosen("ray", cells) == ["test_b"]
    assert chosen("ray", cells, slow=True) == ["test_a", "test_b"]


def test_the_core_of_dist_is_run_too() -> None:
    cells = [Cell("test_a", module="dist/step/test_parity"), Cell("test_b", module="dist/step/test_suspects")]
    assert chosen("dist", cells) == ["test_a"] and len(chosen("dist", cells, slow=True)) == 2


def test_the_store_runs_its_core_on_both_databases() -> None:
    core = [Cell("test_a[sqlite]", module="test_hub"), Cell("test_a[postgres]", "postgres", module="test_hub")]
    both = [Cell("test_b[sqlite]"), Cell("test_b[postgres]", "postgres")]
    assert chosen("store", [*core, *both]) == ["test_a[sqlite]", "test_a[postgres]", "test_b[sqlite]"]
    assert len(chosen("store", both, slow=True)) == 2


def test_marks_of_the_test_itself_count() -> None:
    assert len(chosen("dist", [Cell(f"test_a[{at}]", cells=(4,)) for at in range(4)])) == 4
    assert chosen("unit", [Cell(f"test_a[{at}]", cells=(1,)) for at in range(4)]) == ["test_a[0]"]
    three = [Cell(f"test_a[{at}]", cells=(1, 3)) for at in range(4)]
    assert chosen("dist", three) == ["test_a[0]"] and len(chosen("dist", three, slow=True)) == 3
    cells = [Cell("test_a[0]", "matrix"), Cell("test_a[1]"), Cell("test_a[2]")]
    assert chosen("http", cells) == ["test_a[1]", "test_a[2]"]


def test_other_folders_run_all() -> None:
    assert len(chosen("store", [Cell(f"test_a[{at}]") for at in range(9)])) == 9
