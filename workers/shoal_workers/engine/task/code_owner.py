"""Whose code a file is: the task's, Shoal's, or a library's that acts for its caller; and how a line is named.

Called by `user_code.py` for the frames of an exception, and by `task_collectives.py` for those of a call.
"""

from __future__ import annotations

import ast
import os
import site
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from shoal_workers.contract.exception_causes import FrameOwner

PACKAGE = Path(__file__).parent.parent.parent
ENGINE = f"{PACKAGE}{os.sep}"
TASKS = f"{PACKAGE / 'tasks'}{os.sep}"
"""The tasks that come with Shoal count as the user's code."""
STANDARD = tuple({f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("stdlib", "platstdlib")})
"""Python's own library. The packages that are installed may lie below it."""
INSTALLED = tuple(f"{path}{os.sep}" for path in site.getsitepackages())
_LIBRARIES = (*INSTALLED, *STANDARD)


def owner_of(file: str) -> FrameOwner:
    if file.startswith(TASKS):
        return FrameOwner.TASK
    if file.startswith(ENGINE):
        return FrameOwner.ENGINE
    is_installed = "/site-packages/" in file  # also of another environment, which a .pth file names
    return FrameOwner.LIBRARY if is_installed or file.startswith((*_LIBRARIES, "<frozen ")) else FrameOwner.TASK


def line_in(file: str, number: int, function: str) -> str:
    """`digits.py:41 in loss()`; the file relative to the entry of sys.path that it was imported from."""
    within = f" in {function}()" if function.isidentifier() else ""
    return f"{_relative(file)}:{number}{within}"


def line_of_attribute(owner: object, key: str) -> str:
    """Returns where an attribute is set first: `digits.py:38`; empty: nowhere that can be named."""
    kinds = type(owner).__mro__ if not isinstance(owner, (type, ModuleType)) else getattr(owner, "__mro__", ())
    modules = [owner, *(sys.modules.get(kind.__module__) for kind in kinds)]
    for file in {str(getattr(module, "__file__", "")): None for module in modules if is_file_of_task(module)}:
        if number := line_of_name(file, key):
            return line_in(file, number, "")
    return ""


def line_of_name(file: str, key: str) -> int:
    """Returns the line of a file that sets a name or an attribute first; 0 if none is known."""
    with suppress(OSError, SyntaxError, ValueError):
        numbers = filter(None, (_line_of(node, key) for node in ast.walk(ast.parse(Path(file).read_bytes()))))
        return min(numbers, default=0)
    return 0


def _line_of(node: ast.AST, key: str) -> int:
    """0 if the node does not set it."""
    match node:
        case ast.Attribute(attr=name, lineno=line, ctx=ast.Store()) | ast.Name(id=name, lineno=line, ctx=ast.Store()):
            return line if name == key else 0
        case ast.FunctionDef(name=name, lineno=line):
            return line if name == key else 0
        case ast.Call(func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=name), *_], lineno=line):
            return line if name == key else 0
    return 0


def _relative(file: str) -> str:
    roots = [root.rstrip(os.sep) + os.sep for root in sys.path if len(root) > 1]
    return file.removeprefix(max((root for root in roots if file.startswith(root)), key=len, default=""))


def is_file_of_task(module: object) -> bool:
    """Return whether a module of Python belongs to the user's code, and not to Shoal's tasks."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not file.startswith(TASKS) and owner_of(file) is FrameOwner.TASK
