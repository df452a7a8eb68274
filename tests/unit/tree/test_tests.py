"""The rules of the test suite itself: where files are, what they may import, and that pytest leaves no folder out."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
_SHARED = ("kit", "doubles")
"""The two folders for everything that is no test."""


def _imported(path: Path) -> set[str]:
    """The top-level names that a module imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_pytest_collects_every_folder_with_tests(pytestconfig: pytest.Config) -> None:
    """pytest skips folders by name, and its default list contains `dist` and `build`."""
    skipped = pytestconfig.getini("norecursedirs")
    folders = {folder.name for file in TESTS.rglob("test_*.py") for folder in file.relative_to(TESTS).parents}

    assert folders >= {"dist", "unit", "chaos"}
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in skipped)]


def test_there_is_no_helper_module_between_tests() -> None:
    modules = [path.relative_to(TESTS) for path in TESTS.rglob("*.py") if path.parent != TESTS]
    own = ("conftest.py", "__init__.py")
    helpers = [path for path in modules if path.parts[0] not in _SHARED and path.name not in own]
    assert [str(path) for path in helpers if not path.name.startswith("test_")] == [], "move it to tests/kit"


def test_there_is_no_test_between_helpers() -> None:
    assert [str(path) for name in _SHARED for path in (TESTS / name).rglob("test_*.py")] == []


def test_no_suite_can_be_skipped_in_continuous_integration_for_a_program_that_can_be_installed() -> None:
    """What a test requires by name is installed by .ci/run, which then requires it."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    [listed] = re.findall(r"^export SHOAL_REQUIRE=.*?\}([\w,]+)\"$", ci, re.M)
    installed = set(re.findall(r"^needs (\w+) ", ci, re.M))
    texts = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py") if path != Path(__file__)}
    required = {name for text in texts.values() for name in re.findall(r"\b(?:require|missing)\(\"(\w+)\"", text)}
    assert set(listed.split(",")) == installed | {"helm", "users"} == required  # a Python package; a right of root
    silent = r"skipif\(shutil\.which|pytest\.skip\(MISSING\)|pytest\.skip\(\"the program"
    assert [str(path) for path, text in texts.items() if re.search(silent, text)] == [], "use kit.requirements"


def test_tests_do_not_import_the_benchmarks() -> None:
    bench = {path.stem for path in (ROOT / "bench").glob("*.py")} | {
        path.parent.name for path in (ROOT / "bench").glob("*/__init__.py")
    }
    shadowed = TESTS / "kit" / "shadowing"  # a user's own package `api`, not bench/api
    found = {
        str(path.relative_to(TESTS)): names
        for path in TESTS.rglob("*.py")
        if shadowed not in path.parents and (names := _imported(path) & (bench | {"bench"}))
    }
    assert found == {}


def test_the_benchmarks_import_only_the_shared_folder_of_the_tests() -> None:
    """More workers than the machine can hold are played by the doubles, in bench/scale and bench/api."""
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - {"kit", "ray", "http"}
    names = {path: _imported(path) & (folders | {"tests"}) for path in (ROOT / "bench").rglob("*.py")}
    for path in names:
        names[path] -= {"doubles"} if path.parent.name in ("scale", "api") else set()
    assert {str(path): found for path, found in names.items() if found} == {}
