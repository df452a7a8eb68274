"""Making a gloo group: with a deadline of seconds, and in a way that the training thread can leave.

    training thread   ProcessGroupGloo(...)  waits ............ Fenced
    helper thread     the real constructor: addresses, then one connection to each rank ... ends by its own timeout

gloo connects every pair of ranks in the constructor. A rank that dies or stops before it connects leaves nothing to
shut down at its peers, which wait for the group's timeout: ten minutes. So the constructor, which is replaced here once
per worker, runs on a helper thread with a timeout of its own (`Assignment.connect_timeout_s`). A fenced training thread
leaves at once; the helper thread keeps the half-made group until that timeout, then frees it. Nothing is lost with it:
no tensor has been given to the group yet.

Each rank reads the addresses of all others from the store. Two settings of gloo make that 128 addresses a request, and
keep an address short: otherwise it has a number for each rank, and N ranks read N^3 numbers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo

from shoal_workers.engine.errors import FormFailed

_SLICE_S = 0.02
_own = threading.local()
_is_replaced = False


@dataclass(frozen=True, slots=True)
class _Limits:
    leave: Callable[[], None]
    timeout_s: float


def replace_constructor() -> None:
    """Idempotent; once per worker, before the first group is made."""
    global _is_replaced
    if _is_replaced:
        return
    _is_replaced = True
    plain = ProcessGroupGloo.__init__

    def construct(self: ProcessGroupGloo, *arguments: Any, **named: Any) -> None:
        limits: _Limits | None = getattr(_own, "limits", None)
        if limits is None or "timeout" not in named:
            plain(self, *arguments, **named)
            return
        final, named["timeout"] = named["timeout"], min(timedelta(seconds=limits.timeout_s), named["timeout"])
        _on_helper_thread(lambda: plain(self, *arguments, **named), limits)
        self._set_default_timeout(final)

    ProcessGroupGloo.__init__ = construct  # type: ignore[method-assign]


def shorten_addresses() -> None:
    """Idempotent; before the first group. gloo reads the variables each time that it makes one; all ranks need the same
    values. A rank is known by its number then, which is enough: every group has a listening port of its own."""
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    os.environ.setdefault("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "1")


def _on_helper_thread(construct: Callable[[], None], limits: _Limits) -> None:
    """Raises what `construct` raises, or what `leave` raises, or FormFailed after the deadline, also if the wait of
    `construct` for another rank's address ended first. Without an end of `construct` the thread goes on alone: gloo
    applies its timeout to several attempts, one after the other."""
    deadline_mono = time.monotonic() + limits.timeout_s
    late = f"not all ranks have connected to this one within {limits.timeout_s:g} s"
    errors: list[BaseException] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            construct()
        except BaseException as error:
            errors.append(error)
        is_done.set()

    threading.Thread(target=run, name="shoal-connect", daemon=True).start()
    while not is_done.wait(_SLICE_S):
        limits.leave()
        if time.monotonic() > deadline_mono and not is_done.is_set():
            raise FormFailed(late)
    if errors:
        if isinstance(errors[0], RuntimeError) and time.monotonic() >= deadline_mono:
            raise FormFailed(f"{late}: {errors[0]}") from errors[0]
        raise errors[0]


@contextmanager
def bounded_connecting(leave: Callable[[], None], timeout_s: float) -> Iterator[None]:
    """Within the block, each group that this thread makes takes at most `timeout_s` to connect, then it raises
    FormFailed; `leave` may raise earlier, to end the wait."""
    _own.limits = _Limits(leave, timeout_s)
    try:
        yield
    finally:
        del _own.limits
