"""Ends a Ray worker process that Ray does not use.

    python idle.py SCRIPT ARGUMENTS...        runs SCRIPT in a fork of this interpreter, with this guard

If Ray's head dies while it starts an actor, the raylet still grants the lease that the dead head had requested (Ray
2.60, github.com/ray-project/ray issue 66199). A process starts, no actor is created in it, and it occupies its CPU or
GPU as long as its node lives. Ray sets each process's title; that of an unused process is `ray::IDLE`. If this ends a
process that Ray would have used later, Ray starts another one.
"""

import os
import runpy
import sys
import threading
import time

PATIENCE_S = 20.0
PATIENCE = "SHOAL_IDLE_S"
"""Names another time, for processes that wait for an actor on purpose."""
_NUM_CHECKS = 10
_TITLE_FILE = "/proc/self/cmdline"
_IDLE = b"ray::IDLE"


def end_when_idle(patience_s: float | None = None) -> None:
    """Call once, from any thread. The process ends if it was unused at `_NUM_CHECKS` consecutive checks."""
    if patience_s is None:
        patience_s = float(os.environ.get(PATIENCE, PATIENCE_S))
    threading.Thread(target=_watch, args=(patience_s,), name="shoal-idle", daemon=True).start()


def _watch(patience_s: float) -> None:
    idle = 0
    while idle < _NUM_CHECKS:  # counts checks, not seconds: a process that was stopped meanwhile has not been idle
        time.sleep(patience_s / _NUM_CHECKS)
        title = _title()
        if title.startswith(b"ray::") and not title.startswith(_IDLE):
            return  # it has become an actor's process, and stays one until it ends
        idle = idle + 1 if title.startswith(_IDLE) else 0
    os._exit(0)


def _title() -> bytes:
    with open(_TITLE_FILE, "rb") as file:  # noqa: PTH123  (pathlib takes longer to import)
        return file.read(len(_IDLE))


def main() -> None:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    from shoal_workers.forkserver.code_path import leave_out_code
    from shoal_workers.forkserver.orphans import below_guardian  # the same code as this file's

    leave_out_code()
    below_guardian()
    end_when_idle()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
