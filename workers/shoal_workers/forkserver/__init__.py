"""Ray worker processes forked from one that has imported torch, Ray and the engine: see `server`."""

from __future__ import annotations

import sys
from pathlib import Path


def py_executable() -> str | None:
    """For Ray's runtime environment, in the words of a shell. None where paths hold what a shell would split.

    A node that has no such interpreter starts the `python3` that it finds.
    """
    launch = Path(__file__).with_name("launch.py")
    if any(character.isspace() or character in "'\"$`\\;&|<>()*?" for character in f"{sys.executable}{launch}"):
        return None
    return f"$(test -x {sys.executable} && echo {sys.executable} -I -S {launch} || echo python3)"
