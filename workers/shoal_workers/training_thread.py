"""Runs the engine on a thread of its own in programs without Ray, as in a Ray actor: never on the main thread.

So a task finds the same process everywhere. Python lets only the main thread set signal handlers, for example, and a
task that does so would train in `shoal_workers.run` and fail in the service. Called by standalone.py,
check.py and check_loop.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_LEAVE_S = 10.0

Result = TypeVar("Result")


def on_training_thread(function: Callable[[], Result], interrupt: Callable[[], object]) -> Result:
    """`function()`, on a new thread. Raises what it raises.

    Args:
        interrupt: called if the main thread is interrupted (Ctrl-C); the thread then has 10 s to leave `function`.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="shoal-train", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        interrupt()
        thread.join(_LEAVE_S)
        raise
    if errors:
        raise errors[0]
    return results[0]
