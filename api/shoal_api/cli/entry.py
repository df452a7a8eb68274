"""The console script `shoal`. It loads the command line, and leaves quietly if Ctrl-C is pressed meanwhile.

Nothing is imported before that, because an interrupt within an import would be shown as a traceback.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTED = 130
"""Equals `ExitCode.INTERRUPTED`, which is not imported yet."""


def main() -> None:
    """Run the command line; ends the process with one of `ExitCode`."""
    with exit_on_interrupt():
        from shoal_api.cli.main import main as run

    run()


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process at once on Ctrl-C, while modules are loaded. Does nothing in other threads than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process at once. Nothing was begun, so nothing has to be ended; an exception could be lost or renamed
    inside an import."""
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
