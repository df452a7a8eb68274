"""How worker processes start: forked from a process that has imported everything (`server`), or as Python interpreters.

Called through Ray's runtime environment, which runs `launch` instead of Python; `idle` ends unused workers.
The fork server never trains, opens no device and starts no thread.
"""

from __future__ import annotations

import sys
from pathlib import Path


def py_executable(*, fork: bool) -> str | None:
    """The command for Ray's runtime environment. None if a path contains characters that a shell interprets.

    A node without this interpreter starts the `python3` on its path.
    """
    here = Path(__file__).parent
    if any(character.isspace() or character in "'\"$`\\;&|<>()*?" for character in f"{sys.executable}{here}"):
        return None
    start = f"-I -S {here / 'launch.py'}" if fork else str(here / "idle.py")
    return f"$(test -x {sys.executable} && echo {sys.executable} {start} || echo python3)"
