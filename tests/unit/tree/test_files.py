"""Packages keep the docstrings that STYLE.md asks for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_FOLDERS = ("api", "service", "workers", "tests", "bench", "tools")
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


@pytest.mark.parametrize("package", PACKAGES, ids=_name)
def test_a_package_says_what_is_inside_who_calls_it_and_what_it_never_does(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""
    assert len(docstring.splitlines()) >= _LEAST_DOCSTRING_LINES


def _docstrings(module: Path) -> list[tuple[int, str]]:
    """Line and text of each, those of fields and constants too."""
    nodes = ast.walk(ast.parse(module.read_text(encoding="utf-8")))
    constants = (node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return [(constant.lineno, constant.value) for constant in constants if isinstance(constant.value, str)]


def test_no_docstring_needs_the_name_before_it_to_be_read() -> None:
    fragments = [
        f"{_name(module)}:{line}"
        for module in MODULES
        for line, text in _docstrings(module)
        if text.lstrip().startswith(("Of ", "..."))
    ]
    assert fragments == [], "write a sentence or a noun phrase that says what the thing is"


def test_formatting_is_switched_off_only_with_a_reason() -> None:
    bare = re.compile(r"# fmt: (?:skip|off)\s*$", re.M)
    assert [_name(path) for path in MODULES if bare.search(path.read_text(encoding="utf-8"))] == []
