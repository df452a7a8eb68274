"""Waiting for a collective: how long it takes, and how to leave one that will never come back.

torch's Python collectives end in `Work.wait`, which is replaced here, once per process.

- It is timed: compute time is what is left of a step, and tells a slow rank from one that is kept waiting. On a GPU
  `wait` only orders streams and takes no time, so the two cannot be told apart there this way.
- On gloo it waits in slices. The collective itself runs in a thread of the process group, so the training thread can
  leave at the end of any slice. It must, about one time in 30: gloo then leaves a send waiting whose socket is closed
  already, until the group's timeout. Who may leave, and when, is for `leave` to say (see Group.leave_if_lost).
- Sending to one rank, or receiving from it, has no thread of the group: `wait` itself does it, and one with a deadline
  breaks the connection when it passes. So another thread waits, which is left behind if it comes to the worst.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroup, Work

_SLICE = timedelta(milliseconds=50)
_SLICE_IS_OVER = "Operation timed out!"
"""torch's words for it; gloo's own timeouts read otherwise."""


PlainWait = Callable[[Work], bool]


class _Aside:
    """A thread that waits in another's place."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[PlainWait, Work, list[BaseException], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._obey, name="shoal-aside", daemon=True).start()

    def wait(self, plain_wait: PlainWait, work: Work, leave: Callable[[], None]) -> None:
        """Raises what the wait raises, or `leave`; in the latter case it must not be used again."""
        errors: list[BaseException] = []
        is_done = threading.Event()
        self._orders.put((plain_wait, work, errors, is_done))
        while not is_done.wait(_SLICE.total_seconds()):
            leave()
        if errors:
            raise errors[0]

    def end(self) -> None:
        self._orders.put(None)

    def _obey(self) -> None:
        while (order := self._orders.get()) is not None:
            plain_wait, work, errors, is_done = order
            try:
                plain_wait(work)
            except RuntimeError as error:
                errors.append(error)
            is_done.set()


class _Own(threading.local):
    waited_s = 0.0
    leave: Callable[[], None] | None = None
    aside: _Aside | None = None
    point_to_point: dict[int, Work] | None = None
    """By id, while they are outstanding; only between `leaving` and its end."""


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
            if _own.point_to_point and _own.point_to_point.pop(id(self), None) is not None:
                _wait_aside(plain_wait, self, leave)
                return True
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
    ProcessGroup.send = _remembered(ProcessGroup.send)  # type: ignore[method-assign]
    ProcessGroup.recv = _remembered(ProcessGroup.recv)  # type: ignore[method-assign]


def _remembered(plain: Callable[..., Work]) -> Callable[..., Work]:
    def call(*arguments: Any, **named: Any) -> Work:
        work = plain(*arguments, **named)
        if _own.point_to_point is not None:
            _own.point_to_point[id(work)] = work
        return work

    return call


def _wait_aside(plain_wait: PlainWait, work: Work, leave: Callable[[], None]) -> None:
    aside = _own.aside = _own.aside or _Aside()
    try:
        aside.wait(plain_wait, work, leave)
    except BaseException:
        _own.aside = None  # it may never come back
        aside.end()
        raise


@contextmanager
def leaving(leave: Callable[[], None] | None) -> Iterator[None]:
    """For as long as the block runs, this thread's waits call `leave` now and then; it may raise."""
    _own.leave = leave
    _own.point_to_point = {} if leave is not None else None
    try:
        yield
    finally:
        _own.leave = None
        _own.point_to_point = None


def waited_s() -> float:
    """Seconds that the calling thread has ever waited in collectives."""
    return _own.waited_s
