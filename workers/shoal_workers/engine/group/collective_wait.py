"""Waiting for a collective: measures how long it takes, and can leave a collective that will never end.

torch's Python collectives end in `Work.wait`, which is replaced here, once per worker.

- Each wait is timed: the rest of a step is compute time, which tells a slow rank from one that waits for others. On a
  GPU `wait` only orders streams and takes no time, so it cannot distinguish the two there.
- On gloo a wait is cut into slices. The collective itself runs in a thread of the process group, so the training thread
  can leave at the end of any slice. About one time in 30 it must: gloo then keeps waiting to send on a socket that is
  already closed, until the group's timeout. The `leave` function decides who may leave, and when (see
  Group.leave_if_lost).
- Each call of a collective is noted in the thread's log, see collective_log.py.
- Some operations have no thread of the group that completes them, so `wait` itself does the work. For sending to one
  rank, or receiving from it, a wait with a deadline breaks the connection when the deadline passes; a reduce-scatter,
  which gloo makes of an all-reduce, ignores the deadline. So another thread waits, and is abandoned if the rank leaves.
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

from shoal_workers.engine.group.collective_log import NAMES, CollectiveLog

_SLICE = timedelta(milliseconds=50)
_END_OF_SLICE = "Operation timed out!"
"""torch's message at the end of a slice; gloo's own timeouts have other messages."""


_DONE_BY_WAITING = ("send", "recv", "reduce_scatter", "reduce_scatter_single")

PlainWait = Callable[[Work], bool]


class _WaitingThread:
    """A thread that waits in the place of the training thread."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[PlainWait, Work, list[BaseException], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="shoal-wait", daemon=True).start()

    def wait(self, plain_wait: PlainWait, work: Work, leave: Callable[[], None]) -> None:
        """Raises what the wait raises, or what `leave` raises; after the latter this thread must not be used again."""
        errors: list[BaseException] = []
        is_done = threading.Event()
        self._orders.put((plain_wait, work, errors, is_done))
        while not is_done.wait(_SLICE.total_seconds()):
            leave()
        if errors:
            raise errors[0]

    def end(self) -> None:
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            plain_wait, work, errors, is_done = order
            del order
            try:
                plain_wait(work)
            except RuntimeError as error:
                errors.append(error)
            del work  # else it would keep its tensors until the next wait: the gradients of a whole FSDP unit
            is_done.set()


class _PerThread(threading.local):
    waited_s = 0.0
    leave: Callable[[], None] | None = None
    waiting_thread: _WaitingThread | None = None
    log: CollectiveLog | None = None
    done_by_waiting: dict[int, Work] | None = None
    """Operations whose `wait` does the work: by id, while they are outstanding; only within `interruptible_waits`."""


_own = _PerThread()
_is_replaced = False


def replace_wait() -> None:
    """Idempotent; once per worker, before the first group is made."""
    global _is_replaced
    if _is_replaced:
        return
    _is_replaced = True
    plain_wait = Work.wait

    def wait(self: Work, *arguments: Any, **named: Any) -> bool:
        start = time.perf_counter()
        leave, log = _own.leave, _own.log
        if log is not None:
            log.is_waiting = True
        try:
            if leave is None or arguments or named:
                return bool(plain_wait(self, *arguments, **named))
            if _own.done_by_waiting and _own.done_by_waiting.pop(id(self), None) is not None:
                _wait_on_other_thread(plain_wait, self, leave)
                return True
            while True:
                try:
                    return bool(plain_wait(self, _SLICE))
                except RuntimeError as error:
                    if _END_OF_SLICE not in str(error):
                        raise
                leave()
        finally:
            _own.waited_s += time.perf_counter() - start
            if log is not None:
                log.is_waiting = False

    Work.wait = wait  # type: ignore[method-assign]
    for name in sorted(NAMES.keys() | set(_DONE_BY_WAITING)):
        setattr(ProcessGroup, name, _recorded(name, getattr(ProcessGroup, name)))


def _recorded(name: str, plain: Callable[..., Work]) -> Callable[..., Work]:
    is_done_by_waiting = name in _DONE_BY_WAITING

    def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Work:
        if _own.log is not None:
            _own.log.called(name, arguments)
        work = plain(group, *arguments, **named)
        if is_done_by_waiting and _own.done_by_waiting is not None:
            _own.done_by_waiting[id(work)] = work
        return work

    return call


def _wait_on_other_thread(plain_wait: PlainWait, work: Work, leave: Callable[[], None]) -> None:
    thread = _own.waiting_thread = _own.waiting_thread or _WaitingThread()
    try:
        thread.wait(plain_wait, work, leave)
    except BaseException:
        _own.waiting_thread = None  # its wait may never return
        thread.end()
        raise


@contextmanager
def interruptible_waits(leave: Callable[[], None] | None, log: CollectiveLog | None = None) -> Iterator[None]:
    """Within the block, waits of this thread call `leave` after each slice; `leave` may raise to end the wait. Calls of
    collectives are noted in `log`."""
    _own.leave = leave
    _own.log = log
    _own.done_by_waiting = {} if leave is not None else None
    try:
        yield
    finally:
        _own.leave = None
        _own.log = None
        _own.done_by_waiting = None


def waited_s() -> float:
    """Seconds that the calling thread has waited in collectives since it started."""
    return _own.waited_s
