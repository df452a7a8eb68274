"""A worker process of Ray's that nobody uses ends by itself.

    python idle.py SCRIPT ARGUMENTS...        SCRIPT in this interpreter, under that guard

When Ray's head dies while it starts an actor, the raylet still grants the lease that the dead head asked for (Ray 2.60,
github.com/ray-project/ray issue 66199): a process is started, nobody ever creates an actor in it, and it holds its
processor or GPU for as long as its node lives. Ray titles a process by what it does, and one that does nothing
`ray::IDLE`. To end one that would still have been used is harmless: Ray starts another.
"""

import os
import runpy
import sys
import threading
import time

PATIENCE_S = 20.0
_LOOKS = 10
_TITLE_FILE = "/proc/self/cmdline"
_IDLE = b"ray::IDLE"


def end_when_idle(patience_s: float = PATIENCE_S) -> None:
    """Any thread, once. The process ends when Ray has had no use for it at `_LOOKS` looks in a row."""
    threading.Thread(target=_watch, args=(patience_s,), name="shoal-idle", daemon=True).start()


def _watch(patience_s: float) -> None:
    idle = 0
    while idle < _LOOKS:  # looks, not seconds: a process that was stopped meanwhile has not been idle
        time.sleep(patience_s / _LOOKS)
        title = _title()
        if title.startswith(b"ray::") and not title.startswith(_IDLE):
            return  # an actor's process stays one until it ends
        idle = idle + 1 if title.startswith(_IDLE) else 0
    os._exit(0)


def _title() -> bytes:
    with open(_TITLE_FILE, "rb") as file:  # noqa: PTH123  (pathlib takes longer to import)
        return file.read(len(_IDLE))


def main() -> None:
    end_when_idle()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
