"""Keeps the user's code out of the imports of Ray and Shoal: a `secrets.py` of the user's must not become theirs.

    start of a worker's process    leave_out_code       Ray has put the code directory first; it becomes the last entry,
                                                        where actors that a task starts itself find their modules
    worker of a task or a loop     admit_code           everything is imported; the code is first, but for the names
                                                        that Python, Ray and Shoal use
    process of a script            restore_code         as Python has it: the code is first for every name

Standard library only. Called by server.py and idle.py, by WorkerActor, by script/guardian.py and script/program.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder

CODE = "SHOAL_CODE_PATH"
"""Names the entry of PYTHONPATH that is the job's code."""
_IMPORTED_LATE = frozenset({"attr", "google", "msgpack", "packaging", "requests", "six", "urllib3", "yaml"})
"""Libraries that Ray imports when it needs them."""


def leave_out_code() -> None:
    """Make the code directory the last entry of the path. Ray has made it the current directory."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_here = bool(entries[0]) and os.path.realpath(entries[0]) == os.getcwd()  # noqa: PTH109
    code = os.environ.get(CODE) or (entries[0] if is_here else "")
    if code:
        os.environ[CODE] = code
        sys.path[:] = [*(entry for entry in sys.path if entry != code), code]


def restore_code() -> None:
    """Put what PYTHONPATH names back, behind the folder of the program, as Python would have it."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    code = os.environ.get(CODE, "")
    sys.path[1:] = [entry for entry in sys.path[1:] if entry != code]
    sys.path[1:1] = [entry for entry in dict.fromkeys(entries) if entry and entry not in sys.path]


def admit_code() -> list[str]:
    """Put the code directory first. Return the names of its modules that are hidden, because Python, Ray or Shoal has
    modules of the same names."""
    code = os.environ.get(CODE, "")
    if not code:
        return []
    names = sys.stdlib_module_names | _IMPORTED_LATE | {name.partition(".")[0] for name in sys.modules}
    sys.meta_path.insert(0, _WithoutCode(names, code))
    sys.path.insert(0, code)
    try:
        beside = {name.removesuffix(".py") for name in os.listdir(code)}  # noqa: PTH208
    except OSError:
        return []
    return sorted(name for name in beside & names if PathFinder.find_spec(name, [code]) is not None)


class _WithoutCode:
    """Finds modules of these names anywhere but in the code directory."""

    def __init__(self, names: Iterable[str], code: str) -> None:
        self._names = frozenset(names)
        self._code = code

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if path is not None or name not in self._names:
            return None
        entries = [entry for entry in sys.path if entry and not entry.startswith(self._code)]
        return PathFinder.find_spec(name, entries)
