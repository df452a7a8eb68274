"""Docstrings of packages, targets of the Makefile, sentences that count, and which cells of a test are run."""

import ast
import re
from pathlib import Path

import pytest

from kit.cells import FEW, MORE, leave_out_most
from kit.sources import relative, sources

_LEAST_DOCSTRING_LINES = 3
MODULES = sources("api", "service", "workers", "tests", "bench", "tools")


def test_a_package_says_what_is_inside_who_calls_it_and_what_it_never_does() -> None:
    packages = {path: ast.get_docstring(ast.parse(MODULES[path])) for path in MODULES if path.name == "__init__.py"}
    assert len(packages) > 80
    short = [
        relative(path) for path, text in packages.items() if len((text or "").splitlines()) < _LEAST_DOCSTRING_LINES
    ]
    assert short == []


def test_no_docstring_needs_the_name_before_it_to_be_read() -> None:
    fragment = re.compile(r'^\s*r?"""(?:\s*Of | *\.\.\.)', re.M)
    assert [relative(path) for path, text in MODULES.items() if fragment.search(text)] == [], (
        "write a sentence or a noun phrase that says what the thing is"
    )


def test_formatting_is_switched_off_only_with_a_reason() -> None:
    bare = re.compile(r"# fmt: (?:skip|off)\s*$", re.M)
    assert [relative(path) for path, text in MODULES.items() if bare.search(text)] == []


ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
_STARTED_BY_OTHERS = {
    "http_edge.py",
    "played_service.py",
    "plain_loop.py",
    "torchrun_worker.py",
    "ray_train_driver.py",
    "ray_attempt.py",
    "torchft_agent.py",
    "torchft_worker.py",
    "script.py",
    "ray_train.py",
    "trainer.py",
    "reader.py",
}
"""Programs that a benchmark starts."""
_SEPARATE = {"bench/soak/main.py", "bench/soak/schedules.py", "bench/culprit/main.py", "bench/gpu_checks.py"}
"""`make soak`: a test of half an hour, not a benchmark. `make bench-culprit`: twenty minutes, and needs root. `make
gpu-checks`: runs benchmarks and tests, for a machine with a GPU."""


def _recipes() -> dict[str, str]:
    """Target -> its prerequisites and commands."""
    found = re.findall(r"^([a-z0-9-]+):([^#\n]*)(?:##[^\n]*)?\n((?:\t[^\n]*\n)*)", MAKEFILE, re.M)
    return {target: f"{needs}\n{commands}" for target, needs, commands in found}


def test_make_bench_runs_every_benchmark() -> None:
    recipes = _recipes()
    targets = [name for name in recipes["bench"].split() if name.startswith("bench-")]
    run = recipes["bench"] + "".join(recipes[name] for name in targets)
    scripts = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "bench").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8") and path.name not in _STARTED_BY_OTHERS
    }
    parts = {"bench/planner.py"} if "planner" in run else set()  # a part of bench/layouts/main.py
    assert {script for script in scripts - _SEPARATE - parts if script not in run} == set()


def test_every_target_is_phony_and_has_a_line_of_help() -> None:
    phony = set(re.findall(r"^\.PHONY:(.*)$", MAKEFILE, re.M)[0].split())
    helped = set(re.findall(r"^([a-z0-9-]+):.*##", MAKEFILE, re.M))
    assert phony == helped == set(_recipes())


ROOMS = ("service/shoal_service/core", "service/shoal_service/supervisor", "service/shoal_service/control")
_NOUNS = re.compile(
    r" (?:[a-z-]+ )?(workers|ranks|nodes|jobs|steps|times|groups|re-formations|saves|checkpoints|processes|tries)\b"
)
_AFTER_A_VALUE = re.compile(rf"\}}{_NOUNS.pattern}")
_OF_OTHERS = re.compile(r" (of|and|or|in|on|at|from|to|beyond|for|is|its|by|as) ")
"""`{job} in steps`: what stands before the noun does not count it."""


def uncounted(source: str) -> list[str]:
    """The parts of f-strings in which a count stands before a noun in the plural. A constant is never 1, and a number
    that is rounded was measured."""
    found = []
    for text in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr)):
        for value, after in zip(text.values, text.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue) or value.format_spec or not isinstance(after, ast.Constant):
                continue
            noun = _NOUNS.match(str(after.value))
            expression = ast.unparse(value.value)
            is_constant = re.fullmatch(r"_?[A-Z][A-Z_]+", expression) is not None
            if (
                noun
                and not _OF_OTHERS.match(noun[0])
                and not is_constant
                and not expression.startswith(("count_text(", "_inflect_gives("))
            ):
                found.append(f"{expression}{noun[0]}")
    return found


def test_numbers_before_nouns_are_counted() -> None:
    suspects = {path: text for path, text in sources(*ROOMS).items() if _AFTER_A_VALUE.search(text)}
    matches = {relative(path): parts for path, text in suspects.items() if (parts := uncounted(text))}
    assert matches == {}, "write it with count_text of core/quantities.py"


def test_what_is_looked_for() -> None:
    assert uncounted('f"{n} workers are ready"') == ["n workers"]
    assert uncounted('f"at most {limit} good checkpoints"') == ["limit good checkpoints"]
    assert uncounted("""f"{count_text(n, 'worker')} ready, at most {_MOST} jobs, {job} in steps\"""") == []


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
