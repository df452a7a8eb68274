"""Answers that take long: work for a request ends when its client disconnects."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from shoal_api.http.changes import Changes, Watch
from shoal_api.http.edge import OPEN_ENDED, POLL

_Result = TypeVar("_Result")


async def poll(
    changes: Changes,
    watch: Watch,
    request: Request,
    read: Callable[[], _Result],
    *,
    is_answer: Callable[[_Result], object],
    wait_s: float,
    reread_s: float = math.inf,
) -> _Result:
    """Return what `read` returns, on a worker thread, once that is an answer or `wait_s` seconds have passed.

    It is read again when `watch` is woken, and after `reread_s` seconds.
    """
    if wait_s:
        request.scope[OPEN_ENDED] = POLL
    loop = asyncio.get_running_loop()
    deadline_mono = loop.time() + wait_s
    gone = loop.create_task(until_gone(request)) if wait_s else None
    if gone is not None:
        gone.add_done_callback(lambda _: watch.wake())  # else a client that has gone is noticed at the deadline
    try:
        while True:
            watch.arm()
            result = await run_in_threadpool(read)
            left_s = deadline_mono - loop.time()
            if is_answer(result) or left_s <= 0 or changes.closing or gone is None or gone.done():
                return result
            await watch.wait(min(left_s, reread_s))
    finally:
        if gone is not None:
            gone.cancel()


async def while_connected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Return the result of `work`; None if the client has gone, in which case `work` is cancelled. The request's body
    was read before."""
    loop = asyncio.get_running_loop()
    working, gone = loop.create_task(work), loop.create_task(until_gone(request))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()


async def until_gone(request: Request) -> None:
    """Returns when the client has disconnected. The request's body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
