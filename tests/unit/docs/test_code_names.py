"""The files and functions that the pages name exist: `store/driving.py`, `store/driving.py::begin_attempt`."""

import ast
import re
from functools import cache
from pathlib import Path

from kit.sources import ROOT, relative, sources

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_SOURCES = sources("api", "service", "workers", "tests", "tools", "bench", "examples", "deploy")
_NAMES = {path: f"/{relative(path)}" for path in _SOURCES}
_NAME = re.compile(r"`([\w/]+\.py)(?:::([\w.]+))?`")


def test_every_source_file_and_function_that_a_page_names_exists() -> None:
    missing = []
    for page in PAGES:
        for name, function in _NAME.findall(page.read_text("utf-8")):
            files = [path for path in _NAMES if _NAMES[path].endswith(f"/{name}")]
            if not files:
                missing.append(f"{relative(page)}: {name}: no such file")
            elif function and not any(function in _defined(path) for path in files):
                missing.append(f"{relative(page)}: {name}::{function}: no such function")
    assert missing == []


@cache
def _defined(path: Path) -> set[str]:
    """Functions and classes of a module, and the methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(_SOURCES[path]).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names
