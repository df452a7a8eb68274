"""The rules of the test suite itself: where files are, what they may import, and that pytest leaves no folder out."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kit.sources import ROOT, relative, sources

TESTS = ROOT / "tests"
_SHARED = ("kit", "doubles")
"""The two folders for everything that is no test."""


def _imported(text: str) -> set[str]:
    """The top-level names that a module imports, also inside functions."""
    return set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.M))


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
    texts = {path: text for path, text in sources("tests").items() if path != Path(__file__)}
    required = {name for text in texts.values() for name in re.findall(r"\b(?:require|missing)\(\"(\w+)\"", text)}
    assert set(listed.split(",")) == installed | {"helm", "users"} == required  # a Python package; a right of root
    silent = r"skipif\(shutil\.which|pytest\.skip\(MISSING\)|pytest\.skip\(\"the program"
    assert [str(path) for path, text in texts.items() if re.search(silent, text)] == [], "use kit.requirements"


def test_tests_do_not_import_the_benchmarks() -> None:
    bench = {path.stem for path in (ROOT / "bench").glob("*.py")} | {
        path.parent.name for path in (ROOT / "bench").glob("*/__init__.py")
    }
    found = {
        relative(path): names
        for path, text in sources("tests").items()
        if (names := _imported(text) & (bench | {"bench"}))
    }
    assert found == {}


def test_the_benchmarks_import_only_the_shared_folder_of_the_tests() -> None:
    """More workers than the machine can hold are played by the doubles, in bench/scale and bench/api."""
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - {"kit", "ray", "http"}
    names = {path: _imported(text) & (folders | {"tests"}) for path, text in sources("bench").items()}
    for path in names:
        names[path] -= {"doubles"} if path.parent.name in ("scale", "api") else set()
    assert {str(path): found for path, found in names.items() if found} == {}
