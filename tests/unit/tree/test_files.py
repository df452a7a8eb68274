"""Folders, modules and packages keep the sizes and the docstrings that STYLE.md asks for."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_FOLDERS = ("api", "service", "workers", "tests", "bench", "tools")
_MOST_MODULES = 15
_MIGRATIONS = ROOT / "service" / "shoal_service" / "store" / "migrations" / "versions"
"""A numbered sequence, which only grows."""
_MOST_LINES = 400
_LEAST_DOCSTRING_LINES = 3
MODULES = [
    path
    for folder in _FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not {"__pycache__", "shadowing"} & set(path.parts)
]
PACKAGES = [path for path in MODULES if path.name == "__init__.py"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_folder_has_too_many_modules() -> None:
    counted = [
        path for path in MODULES if path.name not in ("__init__.py", "conftest.py") and path.parent != _MIGRATIONS
    ]
    counts = Counter(_name(path.parent) for path in counted)
    assert {folder: count for folder, count in counts.items() if count > _MOST_MODULES} == {}


def test_no_module_has_too_many_lines() -> None:
    lines = {_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > _MOST_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES, ids=_name)
def test_a_package_says_what_is_inside_who_calls_it_and_what_it_never_does(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""
    assert len(docstring.splitlines()) >= _LEAST_DOCSTRING_LINES


def test_formatting_is_switched_off_only_with_a_reason() -> None:
    bare = re.compile(r"# fmt: (?:skip|off)\s*$", re.M)
    assert [_name(path) for path in MODULES if bare.search(path.read_text(encoding="utf-8"))] == []
