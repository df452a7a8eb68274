"""Answers that take long: work for a request ends when its client disconnects. The long poll for events is one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from shoal_api.answers import EventPage
from shoal_api.http.context import Context
from shoal_api.http.edge import OPEN_ENDED, POLL
from shoal_api.http.followers import read_events

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class EventQuery:
    job_id: str
    after: int
    limit: int
    wait_s: float


async def poll_events(context: Context, request: Request, query: EventQuery) -> EventPage:
    """Return the events after a number; wait up to `wait_s` seconds for the first one.

    Raises:
        JobNotFound
    """
    if query.wait_s:
        request.scope[OPEN_ENDED] = POLL
    loop = asyncio.get_running_loop()
    deadline_mono = loop.time() + query.wait_s
    with context.changes.watching(query.job_id) as watch:
        gone = loop.create_task(until_gone(request)) if query.wait_s else None
        if gone is not None:
            gone.add_done_callback(lambda _: watch.wake())  # else a client that has gone is noticed at the deadline
        try:
            while True:
                watch.arm()
                page = await run_in_threadpool(read_events, context.store, query.job_id, query.after, query.limit)
                left_s = deadline_mono - loop.time()
                if page.items or page.ended or left_s <= 0 or context.changes.closing or gone is None or gone.done():
                    return page
                await watch.wait(left_s)
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
