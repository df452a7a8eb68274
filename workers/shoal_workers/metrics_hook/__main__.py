"""The process of a metrics hook: `python -m shoal_workers.metrics_hook module:Name FD`.

Standard input brings one JSON document a line, FD takes the answers. It ends when the input does: the worker is gone.

    {"job": {...}}                   -> {"started": true}
    {"points": [...]}                -> {"logged": 17}
    {"end": "succeeded"}             -> {"ended": true}
    an exception of the hook         -> {"error": "..."}, its traceback on standard error, and exit status 1

Started by process.py; what the hook prints goes to the job's log.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from shoal_workers.contract.metrics.messages import HookJob, MetricPoint
from shoal_workers.metrics_hook.hook import Hook, NewValues, load_hook

_NICENESS = 10
"""The workers of the node come first."""
Answer = Callable[[dict[str, object]], None]


def main(path: str, descriptor: int) -> int:
    os.nice(_NICENESS)
    answers = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")

    def answer(document: dict[str, object]) -> None:
        answers.write(json.dumps(document) + "\n")

    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
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


def _read(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """On a thread of its own, so that the end of the input also ends a hook that hangs."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
