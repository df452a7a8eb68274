"""Waiting for a collective: how long it takes, and how to leave one that will never come back.

torch's Python collectives end in `Work.wait`, which is replaced here, once per process.

- It is timed: compute time is what is left of a step, and tells a slow rank from one that is kept waiting. On a GPU
  `wait` only orders streams and takes no time, so the two cannot be told apart there this way.
- On gloo it waits in slices. The collective itself runs in a thread of the process group, so the training thread can
  leave at the end of any slice. It must, about one time in 30: gloo then leaves a send waiting whose socket is closed
  already, until the group's timeout. Who may leave, and when, is for `leave` to say (see Group.leave_if_lost).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work

_SLICE = timedelta(milliseconds=50)
_SLICE_IS_OVER = "Operation timed out!"
"""torch's words for it; gloo's own timeouts read otherwise."""


class _Own(threading.local):
    waited_s = 0.0
    leave: Callable[[], None] | None = None


_own = _Own()
_is_replaced = False


def replace_wait() -> None:
    """Idempotent; once per process, before the first group is made."""
    global _is_replaced
    if _is_replaced:
        return
    _is_replaced = True
    plain_wait = Work.wait

    def wait(self: Work, *arguments: Any, **named: Any) -> bool:
        start = time.perf_counter()
        leave = _own.leave
        try:
            if leave is None or arguments or named:
                return bool(plain_wait(self, *arguments, **named))
            while True:
                try:
                    return bool(plain_wait(self, _SLICE))
                except RuntimeError as error:
                    if _SLICE_IS_OVER not in str(error):
                        raise
                leave()
        finally:
            _own.waited_s += time.perf_counter() - start

    Work.wait = wait  # type: ignore[method-assign]


@contextmanager
def leaving(leave: Callable[[], None] | None) -> Iterator[None]:
    """For as long as the block runs, this thread's waits call `leave` now and then; it may raise."""
    _own.leave = leave
    try:
        yield
    finally:
        _own.leave = None


def waited_s() -> float:
    """Seconds that the calling thread has ever waited in collectives."""
    return _own.waited_s
