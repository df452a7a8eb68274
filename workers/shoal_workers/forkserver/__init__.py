"""How the worker processes of shards come to be: forked from one that has imported everything (see `server`), or
interpreters of their own; both end if Ray has no use for them (see `idle`)."""

from __future__ import annotations

import sys
from pathlib import Path


def py_executable(*, fork: bool) -> str | None:
    """For Ray's runtime environment, in the words of a shell. None where paths hold what a shell would split.

    A node that has no such interpreter starts the `python3` that it finds.
    """
    here = Path(__file__).parent
    if any(character.isspace() or character in "'\"$`\\;&|<>()*?" for character in f"{sys.executable}{here}"):
        return None
    start = f"-I -S {here / 'launch.py'}" if fork else str(here / "idle.py")
    return f"$(test -x {sys.executable} && echo {sys.executable} {start} || echo python3)"
