"""The files and functions that the pages name exist: `store/driving.py`, `store/driving.py::begin_attempt`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_SOURCES = tuple(
    str(path.relative_to(ROOT))
    for folder in ("api", "service", "workers", "tests", "tools", "bench", "examples", "deploy")
    for path in (ROOT / folder).rglob("*.py")
)
_NAME = re.compile(r"`([\w/]+\.py)(?:::([\w.]+))?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_and_function_that_a_page_names_exists(page: Path) -> None:
    for name, function in _NAME.findall(page.read_text("utf-8")):
        files = [path for path in _SOURCES if f"/{path}".endswith(f"/{name}")]
        assert files, f"{name}: no such file"
        if function:
            assert any(function in _defined(ROOT / path) for path in files), f"{name}::{function}: no such function"


def _defined(path: Path) -> set[str]:
    """Functions and classes of a module, and the methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{method.name}" for method in methods)
    return found
