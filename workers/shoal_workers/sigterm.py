"""A process's own reaction to SIGTERM, which the children that it forks do not inherit.

`multiprocessing.Pool` ends its processes with SIGTERM and waits for them, so a child that reacts in another way than by
ending would hang its parent. SIGTERM is held back from before a fork until the child has the default action again.
Called by WorkerActor.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

_SIGTERM = {signal.SIGTERM}


def on_sigterm(react: Callable[[], None]) -> None:
    """Main thread, once. `react` is called there, between two instructions of whatever it does."""
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
