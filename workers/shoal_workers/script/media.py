"""Media that a script logs, in the script's own process: `shoal.log(images=...)` copies, and a thread writes.

    script     shoal.log(step, loss, images={...})     checked and copied, 1 ms at most
    recorder   a thread of the same process            encodes, and writes beside the checkpoints, as in an engine

The runner says in the environment where to, and as which rank of which generation. The process is killed before the
next generation begins on its worker, so it needs no fence; what a worker without connection goes on writing has an
older generation. A rank of a script may have several processes: the media of the first one that logs some are kept,
since two would use the same names of files. Called by the package `shoal`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from multiprocessing.util import Finalize
from typing import Any

from shoal_workers.engine.media.recorder import Recorder
from shoal_workers.script.environment import HOOK, MEDIA, MediaTarget

_AT_END_S = 10.0
"""So long the end of the process waits for the storage."""


def log_media(step: int, media: Mapping[str, Any]) -> None:
    """Keep copies of these values for `step`. Called on the thread that trains; it waits for nothing.

    Raises:
        ValueError, TypeError: a name or a value cannot be logged. OSError: another process of this rank logs media.
    """
    _own.recorder().log(step, **media)


class _Own:
    """The recorder of this process; a forked process makes its own."""

    def __init__(self) -> None:
        self._pid = 0
        self._recorder: Recorder | None = None
        self._claim: socket.socket | None = None
        """Bound to a name that one process of the rank can have, until it ends."""

    def recorder(self) -> Recorder:
        if self._recorder is None or self._pid != os.getpid():
            self._claim = _claim_hook(os.environ[HOOK])
            target = MediaTarget.model_validate_json(os.environ[MEDIA])
            recorder = Recorder(target.root, target.settings, say=_say)
            recorder.begin(
                attempt=target.attempt, generation=target.generation, rank=target.rank, is_fenced=lambda: False
            )
            # not atexit: a process of multiprocessing ends without it
            Finalize(None, lambda: recorder.end(within_s=_AT_END_S), exitpriority=0)
            self._recorder, self._pid = recorder, os.getpid()
        return self._recorder


def _claim_hook(hook: str) -> socket.socket:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        claim.bind(f"{hook}-media".replace("@", "\0", 1))
    except OSError:
        claim.close()
        raise OSError("another process of this rank logs images, histograms, tables or texts already") from None
    return claim


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


_own = _Own()
