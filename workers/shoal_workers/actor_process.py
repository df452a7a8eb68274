"""How the process of a Ray actor ends, apart from Ray: with its raylet at once, and on SIGTERM as the actor decides.

Hidden here: that Ray notices the end of a raylet late or never, what children inherit of a signal's handler, and what a
killed process leaves behind. Called by WorkerActor, PollAgent and SupervisorActor.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from shoal_workers.ray_internals import raylet_pid
from shoal_workers.sockets import shut_down_connections


def exit_with_raylet() -> None:
    """End this process as soon as the raylet that started it has ended. Any thread, once.

    Recovery also begins sooner, because the actor's connections are shut down first, and its group notices that.
    """
    # Ray's own check runs once a second and tests whether the pid exists. The pid exists until the dead raylet is
    # reaped. If the process that adopts orphans (a container's first process, for example) reaps none, that is never:
    # the actor would stay alive, unreachable, with its node's memory and its GPU. A pidfd becomes readable as soon as
    # the process has ended. Without a pid or without pidfds only Ray's own check remains.
    pid = raylet_pid()
    if pid is None or not hasattr(os, "pidfd_open"):
        return
    try:
        raylet = os.pidfd_open(pid)
    except OSError:  # it has ended already, which Ray's own check notices
        return
    threading.Thread(target=_wait_and_end, args=(raylet,), name="shoal-raylet", daemon=True).start()


def _wait_and_end(raylet: int) -> None:
    poll = select.poll()
    poll.register(raylet, select.POLLIN)
    poll.poll()
    shut_down_connections()
    os._exit(1)


def use_named_temporary_directory() -> None:
    """Give `multiprocessing` a directory with this pid in its name, and remove those of processes that have ended.

    It removes its directory (`pymp-...`) at the end of the interpreter, and a worker is killed: each that reads with a
    DataLoader would leave a directory behind.
    """
    root = Path(tempfile.gettempdir())
    prefix = f"pymp-shoal-{Path('/proc/self/ns/pid').stat().st_ino}-"  # pids of other containers are other processes
    for left in root.glob(f"{prefix}*"):
        if not Path("/proc", left.name.removeprefix(prefix).partition("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)
    config: dict[str, str] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=root)


_SIGTERM = {signal.SIGTERM}


def on_sigterm(react: Callable[[], None]) -> None:
    """Call `react` on SIGTERM, on the main thread, between two instructions of whatever it does. Main thread, once."""
    # The children that this process forks must not inherit that: `multiprocessing.Pool` ends its processes with SIGTERM
    # and waits for them, so a child that reacts in another way than by ending would hang its parent. SIGTERM is held
    # back from before a fork until the child has the default action again.
    signal.signal(signal.SIGTERM, lambda *_: react())
    forking = threading.local()

    def hold() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def release_child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_child)
