"""Runs the engine outside of the main thread in programs without Ray.

A Ray actor does the same, so a task finds the same process everywhere. For example, Python lets only the main thread
set signal handlers: a task that sets one would train in `shoal_workers.run` and fail in the service.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_LEAVE_S = 10.0

Result = TypeVar("Result")


def run_on_training_thread(function: Callable[[], Result], interrupt: Callable[[], object]) -> Result:
    """Call a function on a new thread; return or raise what it does.

    Args:
        interrupt: called if the main thread is interrupted (Ctrl-C); the thread then has 10 s to leave `function`.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="shoal-train", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        interrupt()
        thread.join(_LEAVE_S)
        raise
    return outcome.result()
