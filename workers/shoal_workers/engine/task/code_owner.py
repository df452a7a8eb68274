"""Whose code a file is: the task's, Shoal's, or a library's that acts for its caller; and how a line is named.

Called by `user_code.py` for the frames of an exception, and by `task_collectives.py` for those of a call.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path

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


def _relative(file: str) -> str:
    roots = [root.rstrip(os.sep) + os.sep for root in sys.path if len(root) > 1]
    return file.removeprefix(max((root for root in roots if file.startswith(root)), key=len, default=""))
