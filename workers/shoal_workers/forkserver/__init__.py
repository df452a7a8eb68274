"""How worker processes start: forked from a process that has imported everything (`server`), or as Python interpreters.

Called through Ray's runtime environment, which runs `launch` instead of Python; `idle` ends unused workers.
The fork server never trains, opens no device and starts no thread.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal_workers.forkserver.idle import PATIENCE as PATIENCE
from shoal_workers.forkserver.idle import PATIENCE_S as PATIENCE_S
from shoal_workers.forkserver.launch import IF_WARM, code_version
from shoal_workers.forkserver.launch import PRELOAD as PRELOAD


def py_executable(*, fork: bool, if_warm: bool = False) -> str | None:
    """Return the command for Ray's runtime environment. `if_warm`: while the fork server still imports, it is not
    waited for, and an interpreter is started. None if a path contains characters that a shell interprets.

    A node without this interpreter starts the `python3` on its path.
    """
    here = Path(__file__).parent
    if any(character.isspace() or character in "'\"$`\\;&|<>()*?" for character in f"{sys.executable}{here}"):
        return None
    option = f" {IF_WARM}" if if_warm else ""
    start = f"-I -S {here / 'launch.py'}{option}" if fork else str(here / "idle.py")
    return f"$(test -x {sys.executable} && echo {sys.executable} {start} || echo python3)"


def preload(module: str, package: Path) -> str:
    """Return the value of the environment variable PRELOAD with which the fork server also imports `module`, which is
    in the folder `package`. It changes with the package's files."""
    newest, count = code_version(str(package))
    return f"{module} {newest}-{count} {package.parent}"
