"""Runs the engine outside of the main thread in programs without Ray and without a supervisor.

A Ray actor does the same, so a task finds the same process everywhere. For example, Python lets only the main thread
set signal handlers: a task that sets one would train in `shoal_workers.run` and fail in the service.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shoal_workers.contract import WorkerPoll
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.process.outbox import Outbox

_LEAVE_S = 10.0
_POLL_S = 0.5

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


def run_engine(
    engine: Engine,
    outbox: Outbox,
    function: Callable[[], Result],
    interrupt: Callable[[], object],
    read: Callable[[WorkerPoll], None],
) -> Result:
    """Call a function of the engine as `run_on_training_thread` does, and close the engine at its end.

    Args:
        read: called on another thread with what the engine reports, in order, until all of it was read.
    """

    def read_all() -> None:
        after, is_open = 0, True
        while is_open:
            poll = outbox.poll(after, _POLL_S, lambda: engine.progress)
            after = poll.seq
            read(poll)
            is_open = bool(poll.reports) or not outbox.is_closed

    reader = threading.Thread(target=read_all, name="shoal-reports")
    reader.start()
    try:
        return run_on_training_thread(function, interrupt)
    finally:
        engine.close()
        outbox.close()
        reader.join()
