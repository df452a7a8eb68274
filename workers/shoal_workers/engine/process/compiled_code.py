"""Where torch.compile keeps what it has generated, so that a block is compiled once on a node.

    a group re-forms, same layout     the model stays, with its compiled code: nothing is compiled
    a group re-forms, other layout    torch finds the code of equal blocks in its own process: nothing is compiled
    a new worker, or another job      traces the block again, and reads the generated code from this directory

torch's own default is a directory of a known name in /tmp. Whoever makes it first chooses what others load and run, and
a node may empty /tmp. So it is one that only this user can write, beside the packages of `code.pip`, unless the
environment (`code.env`) names another. Called by `TaskProgram` before anything is compiled.
"""

from __future__ import annotations

import os
from pathlib import Path

from shoal_workers.package_sets import root_of_node

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def share_compiled_code(root: Path | None = None) -> Path:
    """Returns the directory. torch reads the variable whenever it compiles."""
    if (chosen := os.environ.get(VARIABLE)) is not None:
        return Path(chosen)
    directory = root or root_of_node().parent / "compiled"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ[VARIABLE] = str(directory)
    return directory
