"""Finds the function of a loop: runs the user's file as `__main__` until it calls `shoal.run(train)`.

In a worker the call does not return: it hands the function over and leaves the file, as if it had ended there. So what
stands after it in the file runs only where no service runs it. Runs on the training thread.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from shoal_workers.contract.user_code import ProgramFile

_state: dict[str, bool] = {"is_capturing": False}


class Captured(BaseException):
    """Carries the function out of the user's file."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        super().__init__(function)
        self.function = function


def is_capturing() -> bool:
    """Return whether `shoal.run` is to hand over its function, because a worker runs the file."""
    return _state["is_capturing"]


def load_function(program: ProgramFile) -> Callable[[Any], None]:
    """Run the program up to `shoal.run`, and return the function that it gives.

    Raises:
        RuntimeError: the file has ended without it.
        FileNotFoundError: there is no such file or module.
    """
    main = ModuleType("__main__")
    code = _prepare(program, main)
    sys.modules["__main__"] = main  # classes of the file are looked up there
    _state["is_capturing"] = True
    try:
        exec(code, main.__dict__)
    except Captured as captured:
        return captured.function
    finally:
        _state["is_capturing"] = False
    raise RuntimeError(
        f"{program.words} has ended without shoal.run(train). A loop gives its function to shoal.run; a program that "
        "does not is a script: submit it with script instead of loop."
    )


def _prepare(program: ProgramFile, main: ModuleType) -> CodeType:
    """Make the process look as `python FILE` or `python -m MODULE` would, and return the code."""
    if program.file is not None:
        path = Path(program.file).absolute()
        if not path.is_file():
            raise FileNotFoundError(f"loop.file {program.file!r}: there is no such file in the job's code.")
        sys.argv = [str(path), *program.args]
        sys.path.insert(0, str(path.parent))
        main.__file__ = str(path)
        return compile(path.read_bytes(), str(path), "exec")
    assert program.module is not None
    sys.path.insert(0, str(Path.cwd()))
    spec = importlib.util.find_spec(program.module)
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(program.module) if hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise FileNotFoundError(f"loop.module {program.module!r}: there is no such module in the job's code.")
    sys.argv = [str(spec.origin), *program.args]
    main.__file__, main.__spec__, main.__package__ = spec.origin, spec, program.module.rpartition(".")[0]
    assert isinstance(code, CodeType)
    return code
