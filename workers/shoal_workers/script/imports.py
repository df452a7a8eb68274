"""What a script imports, noted in its process and imported by the guardian before it forks the next one.

    script     import transformers      noted in memory that both processes share
    guardian   after the script's end   imports the same libraries again; the next fork has them already

Only libraries: the script's own modules are its own in every process, and may have changed. Imports that start threads
or use the GPU make a process unfit for forks; `Imports.repeat` says so. Standard library only. Used by guardian.py and
program.py.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import mmap
import os
import sys
import sysconfig
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib.machinery import ModuleSpec

_MAX_BYTES = 256 << 10
_STANDARD = tuple({f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("stdlib", "platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")


class Imports:
    """The names of one script's imports. Made by the guardian before the fork."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _MAX_BYTES)
        self._size = 0
        self._pid = 0

    def note_own(self) -> None:
        """Called in the script's process: note what it imports from now on."""
        self._pid = os.getpid()
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Called by Python for each module that is not imported yet. Finds nothing itself."""
        line = f"{name}\n".encode()
        # Forks of the script share the memory and not the size.
        if os.getpid() == self._pid and self._size + len(line) <= _MAX_BYTES:
            self._shared[self._size : self._size + len(line)] = line
            self._size += len(line)
        return None

    def repeat(self) -> bool:
        """Called in the guardian at the end of the script. Returns whether it may still fork."""
        names = self._shared[:].split(b"\0", 1)[0].decode(errors="replace").split("\n")
        self._shared.close()
        before = _num_threads()
        out, err = _Stream("stdout"), _Stream("stderr")
        with redirect_stdout(out), redirect_stderr(err):
            for name in names[:-1]:
                if name not in sys.modules:
                    with suppress(Exception, SystemExit):
                        _import_library(name)
        out.is_silent = err.is_silent = False
        gc.freeze()
        torch = sys.modules.get("torch")
        return _num_threads() <= before and not (torch is not None and torch.cuda.is_initialized())


class _Stream(io.TextIOBase):
    """A standard stream as a library finds it that is imported here: silent now, and in the next script that script's
    own. Libraries keep it, for example in the handler of their log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_silent = True

    def write(self, text: str) -> int:
        return len(text) if self.is_silent else int(getattr(sys, self._name).write(text))

    def flush(self) -> None:
        if not self.is_silent:
            getattr(sys, self._name).flush()


def _import_library(name: str) -> None:
    top = importlib.util.find_spec(name.partition(".")[0])
    file = top.origin if top is not None else None
    if file is not None and (file.startswith(_STANDARD) or any(part in file for part in _INSTALLED)):
        importlib.import_module(name)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208
