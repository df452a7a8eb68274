"""The modules that faults are drawn over, and the statements of a source text.

A statement is known by its number in its module: the n-th statement inside a function, in the order of the text.
Statements outside functions are not counted: they run at import, for every test alike.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "workers/shoal_workers/engine/step",
    "workers/shoal_workers/engine/loop",
    "workers/shoal_workers/engine/state",
    "workers/shoal_workers/snapshot_store",
    "service/shoal_service/core/attempt",
    "service/shoal_service/core/scheduling",
    "service/shoal_service/store",
    "api/shoal_api/http",
)


def list_modules(room: str) -> list[str]:
    """The modules of a room, as paths from the root of the tree, sorted."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / room).rglob("*.py"))


def hash_sources() -> str:
    """A short hash of the text of all rooms. What was measured with one hash says nothing about another."""
    digest = hashlib.sha256()
    for path in (path for room in ROOMS for path in list_modules(room)):
        digest.update(path.encode() + b"\0" + (ROOT / path).read_bytes())
    return digest.hexdigest()[:12]


def iterate_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements inside functions, without docstrings and declarations of names, in the order of the text."""
    for node in tree.body:
        yield from _inside(node, in_function=False)


def _inside(node: ast.AST, *, in_function: bool) -> Iterator[ast.stmt]:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):  # in the order of the text
        children = getattr(node, name, [])
        for child in children if isinstance(children, list) else []:  # the body of a lambda is an expression
            if not isinstance(child, ast.stmt):
                yield from _inside(child, in_function=in_function)  # a handler or a case
                continue
            if (in_function or is_function) and not _is_declaration(child):
                yield child
            yield from _inside(child, in_function=in_function or is_function)


def _is_declaration(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Global | ast.Nonlocal)


def copy_tree(target: Path) -> None:
    """Copies the files of the working tree that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():  # a deleted file is still listed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
