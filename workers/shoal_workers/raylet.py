"""An actor's process ends with the raylet that started it, at once.

Ray's own check runs once a second and asks whether the pid exists. It does while the dead raylet waits to be reaped,
which may be for ever where the container's first process, or whoever else adopts orphans, reaps nobody: the actor would
live on, unreachable, with its node's memory and its GPU. A pidfd is readable as soon as the process has ended. A
recovery begins sooner as well: its connections are shut first, and that is what its group notices.
"""

from __future__ import annotations

import os
import select
import threading

from shoal_workers.sockets import hang_up

_PID = "RAY_RAYLET_PID"
"""Ray sets it in the environment of every worker process."""


def end_with_raylet() -> None:
    """Any thread, once. Without a pid, or where there are no pidfds, Ray's own check has to do."""
    pid = os.environ.get(_PID, "")
    if not pid.isdecimal() or not hasattr(os, "pidfd_open"):
        return
    try:
        raylet = os.pidfd_open(int(pid))
    except OSError:  # it is gone already, and Ray's own check sees that
        return
    threading.Thread(target=_wait_and_end, args=(raylet,), name="shoal-raylet", daemon=True).start()


def _wait_and_end(raylet: int) -> None:
    poll = select.poll()
    poll.register(raylet, select.POLLIN)
    poll.poll()
    hang_up()
    os._exit(1)
