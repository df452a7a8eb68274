"""Ends an actor's process as soon as the raylet that started it has ended.

Ray's own check runs once a second and tests whether the pid exists. The pid exists until the dead raylet is reaped. If
the process that adopts orphans (a container's first process, for example) reaps none, that is never: the actor would
stay alive, unreachable, with its node's memory and its GPU. A pidfd becomes readable as soon as the process has ended.
Recovery also begins sooner, because the actor's connections are shut down first, and its group notices that. Called by
WorkerActor and SupervisorActor.
"""

from __future__ import annotations

import os
import select
import threading

from shoal_workers.sockets import shut_down_connections

_PID = "RAY_RAYLET_PID"
"""Ray sets it in the environment of every worker process."""


def exit_with_raylet() -> None:
    """Any thread, once. Without a pid or without pidfds, only Ray's own check remains."""
    pid = os.environ.get(_PID, "")
    if not pid.isdecimal() or not hasattr(os, "pidfd_open"):
        return
    try:
        raylet = os.pidfd_open(int(pid))
    except OSError:  # it has ended already, which Ray's own check notices
        return
    threading.Thread(target=_wait_and_end, args=(raylet,), name="shoal-raylet", daemon=True).start()


def _wait_and_end(raylet: int) -> None:
    poll = select.poll()
    poll.register(raylet, select.POLLIN)
    poll.poll()
    shut_down_connections()
    os._exit(1)
