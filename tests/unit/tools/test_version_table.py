"""`make test-versions`, the ranges of pyproject.toml and the table of docs/install.md agree."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shoal_api.cli.commands.doctor import Verdict, judge_library

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PAGE = (ROOT / "docs" / "install.md").read_text("utf-8")
PINNED = (ROOT / "constraints.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "test_versions.py"))


@pytest.fixture(scope="module")
def rows(tool: dict[str, Any]) -> list[list[str]]:
    """The cells of the table's rows: Python, torch, Ray, tests, day."""
    text = PAGE.split(tool["BEGIN"])[1].split(tool["END"])[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()[2:]]


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _accepted(library: str) -> set[tuple[int, ...]]:
    """The minor releases in the package's range."""
    [required] = [one for one in PROJECT["dependencies"] if re.match(rf"{library}\b", one)]
    [(oldest, above)] = re.findall(r">=(\d+\.\d+),<(\d+\.\d+)$", required)
    return {(_minor(oldest)[0], minor) for minor in range(_minor(oldest)[1], _minor(above)[1])}


def _passed(rows: list[list[str]]) -> list[list[str]]:
    return [row for row in rows if re.fullmatch(r"[1-9]\d* passed", row[3])]


def test_the_page_has_a_row_for_each_combination(tool: dict[str, Any], rows: list[list[str]]) -> None:
    assert [tuple(row[:3]) for row in rows] == [(one.python, one.torch, one.ray) for one in tool["COMBINATIONS"]]


@pytest.mark.parametrize(("library", "column"), [("torch", 1), ("ray", 2)])
def test_the_package_accepts_only_releases_of_which_a_run_passed(
    rows: list[list[str]], library: str, column: int
) -> None:
    [pinned] = re.findall(rf"^{library}==([\d.]+)$", PINNED, re.M)  # `make test` runs those
    assert _accepted(library) <= {_minor(pinned), *(_minor(row[column]) for row in _passed(rows))}


@pytest.mark.parametrize("library", ["torch", "ray"])
def test_the_doctor_accepts_what_the_package_does(library: str) -> None:
    tried = [(2, minor) for minor in range(100)]
    judged = {one for one in tried if judge_library(library, f"{one[0]}.{one[1]}.0", "").verdict is Verdict.OK}
    assert judged == _accepted(library)


def test_an_environment_has_other_releases_of_torch_and_ray_only(tool: dict[str, Any]) -> None:
    oldest = next(one for one in tool["COMBINATIONS"] if one.name == "oldest")
    pinned, lines = set(PINNED.splitlines()), set(tool["constraints_of"](oldest, PINNED).splitlines())
    assert {line.split("==")[0] for line in pinned - lines} == {"torch", "ray"}
    assert lines - pinned == {f"torch=={oldest.torch}", f"ray=={oldest.ray}"}
    required = tool["requirements_of"](oldest, PROJECT)
    assert {f"torch=={oldest.torch}", f"ray[default,train]=={oldest.ray}"} == set(required) - {
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    }


def test_a_failure_is_named_in_the_table(tool: dict[str, Any]) -> None:
    one = tool["COMBINATIONS"][0]
    result = tool["Result"](combination=one, day="2026-01-31", passed=3, failed=("a::b",), install_s=1.0, tests_s=2.0)
    assert tool["table"]([result]).splitlines()[2].endswith("| 3 passed, 1 failed: a::b | 2026-01-31 |")
    page = f"before\n{tool['BEGIN']}\nold\n{tool['END']}\nafter"
    assert tool["page"](page, [result]) == page.replace("old\n", tool["table"]([result]))


def test_a_release_that_cannot_be_had_is_neither_a_pass_nor_a_failure(
    tool: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(*_: object, **__: object) -> None:
        raise tool["_Missing"]("the package index has no ray==2.57.1 for Python 3.11 on this machine")

    inside = tool["main"].__globals__
    monkeypatch.setitem(inside, "BUILD", tmp_path)
    monkeypatch.setitem(inside, "_install", lacks)
    monkeypatch.setattr("sys.argv", ["test_versions.py", "ray-2.57"])
    assert tool["main"]() == 3
    assert "not run: the package index has no ray==2.57.1 for Python 3.11" in capsys.readouterr().out
    assert not (tmp_path / "results.json").exists()


@pytest.mark.slow
def test_every_test_of_the_sample_exists(tool: dict[str, Any]) -> None:
    """The cells of a matrix have other names when it gets a choice more."""
    tests = [test for kind in tool["SAMPLE"].values() for test in kind]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not soak", *tests]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
