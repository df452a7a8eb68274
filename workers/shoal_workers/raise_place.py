"""Where an exception was raised: by a `raise` statement of a file, or by native code.

Imports the standard library only: the process of a script calls it (script/program.py), and the engine.
"""

from __future__ import annotations

import dis

_RAISE = dis.opmap["RAISE_VARARGS"]


def raising_file(error: BaseException) -> str:
    """Return the file whose `raise` statement has raised the exception; empty if native code did."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None or step.tb_frame.f_code.co_code[step.tb_lasti] != _RAISE:
        return ""
    return step.tb_frame.f_code.co_filename
