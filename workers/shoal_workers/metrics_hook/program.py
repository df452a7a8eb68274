"""The contract of a metrics hook, and the program that runs one: `python -m shoal_workers.metrics_hook.program
MODULE:NAME FD`.

FD is a connection, which brings one JSON document a message and takes the answers. It ends with it: the worker is gone.

    {"job": {...}}                   -> {"started": true}
    {"points": [...]}                -> {"logged": 17}
    {"end": "succeeded"}             -> {"ended": true}
    an exception of the hook         -> {"error": "..."}, its traceback on standard error, and exit status 1

A hook is a plain object that imports nothing from Shoal. Hidden here: what keeps a step from being logged twice, and
that user code may hang or leave. Started by process.py; what the hook prints goes to the job's log.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

from shoal_workers.contract import HookJob, MetricPoint

_NICENESS = 10
"""The workers of the node come first."""
Answer = Callable[[dict[str, object]], None]


def main(path: str, descriptor: int) -> int:
    os.nice(_NICENESS)
    pipe: Connection = Connection(descriptor)

    def answer(document: dict[str, object]) -> None:
        pipe.send_bytes(json.dumps(document).encode())

    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, requests), daemon=True).start()
    try:
        _serve(path, requests.get, answer)
    except BaseException as error:  # the one catch-all of this process, also for a hook that calls sys.exit
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _serve(path: str, next_request: Callable[[], dict[str, Any]], answer: Answer) -> None:
    hook = load_hook(path)
    new_values = NewValues(hook.start(HookJob(**next_request()["job"])))
    answer({"started": True})
    while True:
        request = next_request()
        if "end" in request:
            hook.end(request["end"])
            answer({"ended": True})
            return
        points = [MetricPoint(**point) for point in request["points"]]
        _log(hook, new_values, points)
        answer({"logged": points[-1].seq})


def _log(hook: Hook, new_values: NewValues, points: list[MetricPoint]) -> None:
    for point in points:
        if values := new_values.of(point):
            hook.log(point.step, values, point.at)
    if flush := getattr(hook, "flush", None):
        flush()


def _read(pipe: Connection, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Run on a thread of its own, so that the end of the connection also ends a hook that hangs."""
    with suppress(EOFError, ConnectionError):
        while True:
            requests.put(json.loads(pipe.recv_bytes()))
    os._exit(0)


class Hook(Protocol):
    """What `metrics.hook` makes. Calls come one after the other, on the main thread of a process of its own.

    Optional member:

        flush() -> None
            After some calls of `log`. When it returns, what was logged before must be safe with the tracker.
    """

    def start(self, job: HookJob) -> Mapping[str, int] | None:
        """Open the job's run, or go on with it after a restart.

        Returns the last step that the tracker has of each metric; values of these steps and before are not logged
        again. None or {}: it has nothing.
        """

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """New values of one step, which ended at `at` (seconds since the epoch). Steps do not go down."""

    def end(self, state: str) -> None:
        """The attempt is over: "succeeded", "failed", "cancelled", "paused" or "queued". After the last two, and often
        after "failed", `start` is called again later, maybe on another machine."""


def load_hook(path: str) -> Hook:
    """Make the hook that `module:Name` names."""
    module, _, name = path.partition(":")
    hook: Hook = getattr(importlib.import_module(module), name)()
    return hook


class NewValues:
    """Drops what was logged before: a recovery repeats steps, and a new process gets points that its predecessor may
    have logged."""

    def __init__(self, last_steps: Mapping[str, int] | None) -> None:
        """`last_steps`: what `Hook.start` has returned."""
        self._last_steps = dict(last_steps or {})

    def of(self, point: MetricPoint) -> dict[str, float]:
        """Return the values that are not logged yet. They count as logged from now on."""
        new = {name: value for name, value in point.values.items() if point.step > self._last_steps.get(name, -1)}
        self._last_steps.update(dict.fromkeys(new, point.step))
        return new


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
