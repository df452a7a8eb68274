"""What Shoal does to torch's plain collectives: it times them, logs them, can leave one that will never end, and
knows a broken one by its error. Hides what `Work.wait` and gloo do and do not do when a rank is lost.

torch's Python collectives end in `Work.wait`, which is replaced here, once per worker.

- Each wait is timed: the rest of a step is compute time, which tells a slow rank from one that waits for others. On a
  GPU `wait` only orders streams and takes no time, so there the stream's own time is taken (device_clock.py).
- On gloo a wait is cut into slices, and the training thread can leave at the end of any slice. The `leave` function
  decides who may leave, and when (see Group.leave_if_lost).
- Each call is noted in the generation's `CollectiveLog`: in every step a rank calls the same collectives, in the same
  order, with the same sizes. A rank that leaves this order alone makes the others wait for ever, or exchanges the wrong
  tensors; the comparison with its own step before shows it, even in a group of two.
- DTensor's functional all-reduce would wait in C++ without a way out, so on the CPU it is replaced by the plain
  one. Only all-reduce is used inside a step, by an optimizer of a task's own on DTensors.

The training thread calls and waits; any thread reads `CollectiveLog.newest`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed import DistError, ProcessGroup, Work

from shoal_workers.contract.exception_causes import is_broken_collective
from shoal_workers.contract.plain_text import text_of
from shoal_workers.contract.profiles import OF_AXIS, WAITING
from shoal_workers.contract.suspects import Collective
from shoal_workers.engine.group.device_clock import DeviceClock
from shoal_workers.raise_place import raising_file
from shoal_workers.torch_internals import group_named, is_profiling

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
    clock: DeviceClock | None = None
    done_by_waiting: dict[int, Work] | None = None
    """Operations whose `wait` does the work: by id, while they are outstanding; only within `interruptible_waits`."""


_own = _PerThread()


@cache
def replace_wait() -> None:
    """Replace `Work.wait`, and the methods of ProcessGroup that begin a collective. Idempotent; called once per
    worker, before the first group is made."""
    plain_wait = Work.wait

    def wait_in_slices(work: Work, leave: Callable[[], None] | None, arguments: Any, named: Any) -> bool:
        if leave is None or arguments or named:  # a wait with a deadline of its own ends by itself
            return bool(plain_wait(work, *arguments, **named))
        # Nothing completes these but the wait itself: a slice that ends would break the connection (send, receive), and
        # a reduce-scatter, which gloo makes of an all-reduce, ignores its deadline.
        if _own.done_by_waiting and _own.done_by_waiting.pop(id(work), None) is not None:
            _wait_on_other_thread(plain_wait, work, leave)
            return True
        # A thread of the group completes the rest, so this one may give up at the end of any slice, and must about once
        # in 30 times: gloo waits to send on a socket that is already closed, until the group's timeout.
        while True:
            try:
                return bool(plain_wait(work, _SLICE))
            except RuntimeError as error:
                if _END_OF_SLICE not in str(error):
                    raise
            leave()

    def wait(self: Work, *arguments: Any, **named: Any) -> bool:
        start = time.perf_counter()
        leave, log, clock = _own.leave, _own.log, _own.clock
        if log is not None:
            log.is_waiting = True
        waiting = clock.wait_begins() if clock is not None else None
        try:
            with record_function(WAITING) if is_profiling() else nullcontext():
                return wait_in_slices(self, leave, arguments, named)
        except RuntimeError as error:
            if log is not None:
                log.failed(error)
            raise
        finally:
            _own.waited_s += time.perf_counter() - start
            if clock is not None and waiting is not None:
                clock.wait_ends(waiting)
            if log is not None:
                log.is_waiting = False

    Work.wait = wait  # type: ignore[method-assign]
    for name in NAMES:
        if (plain := getattr(ProcessGroup, name, None)) is not None:
            setattr(ProcessGroup, name, _recorded(name, plain))


def _recorded(name: str, plain: Callable[..., Work]) -> Callable[..., Work]:
    is_done_by_waiting = name in _DONE_BY_WAITING

    def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Work:
        log = _own.log
        if log is not None:
            log.called(name, arguments)
        try:
            with _named(group, name):
                work = plain(group, *arguments, **named)
        except RuntimeError as error:
            if log is not None:
                log.failed(error)
            raise
        if is_done_by_waiting and _own.done_by_waiting is not None:
            # The reference keeps the id from being given to another operation.
            _own.done_by_waiting[id(work)] = work
        return work

    return call


def _named(group: ProcessGroup, method: str) -> AbstractContextManager[Any]:
    """Names the axis of a collective in a profile: gloo's own events do not."""
    if not is_profiling():
        return nullcontext()
    return record_function(f"{OF_AXIS}{group.group_desc} {NAMES[method]}")


def _wait_on_other_thread(plain_wait: PlainWait, work: Work, leave: Callable[[], None]) -> None:
    thread = _own.waiting_thread = _own.waiting_thread or _WaitingThread()
    try:
        thread.wait(plain_wait, work, leave)
    except BaseException:
        _own.waiting_thread = None  # its wait may never return
        thread.end()
        raise


@contextmanager
def interruptible_waits(
    leave: Callable[[], None] | None, log: CollectiveLog | None = None, clock: DeviceClock | None = None
) -> Iterator[None]:
    """Make this thread's waits within the block call `leave` after each slice; `leave` may raise to end the wait.
    Calls of collectives are noted in `log`, and waits of a GPU's stream in `clock`."""
    _own.leave = leave
    _own.log = log
    _own.clock = clock
    _own.done_by_waiting = {} if leave is not None else None
    try:
        yield
    finally:
        _own.leave = None
        _own.log = None
        _own.clock = None
        _own.done_by_waiting = None


def clock_of_this_thread() -> DeviceClock | None:
    """Return the clock of `interruptible_waits`; None on a CPU."""
    return _own.clock


def waited_s() -> float:
    """Seconds that the calling thread has waited in collectives since it started."""
    return _own.waited_s


NAMES = {
    "allreduce": "all-reduce",
    "allreduce_coalesced": "all-reduce",
    "allgather": "all-gather",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "gather_single": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "receive",
}
"""Methods of torch's ProcessGroup that are recorded, and the words for them. Not every version has all of them."""
_Call = tuple[str, int]


class CollectiveLog:
    """One per generation and training thread."""

    def __init__(self) -> None:
        self._number = 0
        self._last: _Call = ("", 0)
        self._before: list[_Call] = []
        """The calls of the last complete step."""
        self._is_usual = False
        """The step before that had the same calls. The first step of a generation has others."""
        self._step: list[_Call] = []
        self._in_step = False
        self._deviation = ""
        self.is_waiting = False
        self.failure = ""
        """What broke the first collective that has failed; empty: none has. The code that called it may go on as if
        nothing had happened."""

    def failed(self, error: RuntimeError) -> None:
        """A collective has raised."""
        if not self.failure and is_collective_error(error):
            self.failure = text_of(error)

    def begin_step(self) -> None:
        self._step, self._in_step, self._deviation = [], True, ""

    def end_step(self) -> None:
        self._is_usual = self._before == self._step
        self._before, self._in_step = self._step, False

    def called(self, method: str, arguments: tuple[Any, ...]) -> None:
        call = NAMES[method], _bytes_of(arguments[:2])
        self._number, self._last = self._number + 1, call
        if not self._in_step:
            return
        place = len(self._step)
        self._step.append(call)
        if self._deviation or not self._is_usual:
            return
        expected = self._before[place] if place < len(self._before) else None
        if expected != call:
            usual = _words(expected) if expected else "no further collective"
            self._deviation = (
                f"called {_words(call)} as number {place + 1} of its step, where its last step had {usual}"
            )

    @property
    def newest(self) -> Collective:
        name, num_bytes = self._last
        return Collective(
            number=self._number,
            name=name or "none",
            bytes=num_bytes,
            is_waiting=self.is_waiting,
            deviation=self._deviation,
        )


def _words(call: _Call) -> str:
    return f"{'an' if call[0].startswith('a') else 'a'} {call[0]} of {call[1]:,} bytes"


def _bytes_of(tensor: Any) -> int:
    """The bytes of a tensor, a list of them, or a list of lists."""
    if isinstance(tensor, Tensor):
        return tensor.numel() * tensor.element_size()
    return sum(map(_bytes_of, tensor)) if isinstance(tensor, (list, tuple)) else 0


_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


@cache
def replace_functional_all_reduce() -> torch.library.Library:
    """Idempotent. The replacement waits itself, so a later `wait_tensor` returns at once. The library is kept, because
    its kernels are removed when it is freed."""
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("all_reduce", _all_reduce, "CPU")  # type: ignore[no-untyped-call]
    return library


def _all_reduce(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    # A functional collective must not change its input.
    reduced = tensor.clone(memory_format=torch.contiguous_format)
    group = group_named(group_name)
    dist.all_reduce(reduced, _OPERATIONS[reduce_op.lower()], group=group)
    return reduced


def is_collective_error(error: BaseException) -> bool:
    """Return whether `error`, or an error that it was raised from, comes from a broken collective."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        is_runtime_error = isinstance(link, RuntimeError)
        if is_broken_collective(isinstance(link, DistError), is_runtime_error, text_of(link), raising_file(link)):
            return True
        link = link.__cause__ or link.__context__
    return False
