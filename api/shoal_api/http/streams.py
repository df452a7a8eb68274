"""Streams of a job's changes: server-sent events or plain text. A follower reads the store again after each change.

A stream sends each item in order and exactly once, from the position that the client names. It ends when its follower
has sent everything, when the client disconnects, or when the application closes. Only in the first case it sends an
event `end`; otherwise the client should connect again. It also ends, without that event, when the token or the session
of the request is no longer valid: at the latest with the next heartbeat.

Also long polls, whose work ends when the client disconnects.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from shoal_api.http.access.request_scope import LIMITER, OPEN_ENDED, POLL, STILL_VALID, STREAM
from shoal_api.http.changes import NO_JOB, Changes, Watch
from shoal_api.http.problems import TooManyRequests, problem_response

EVENT_STREAM = "text/event-stream"
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}}}
"""`responses` of a route that also answers with a stream."""
_SSE_OPENING = b"retry: 1000\n\n"
_SSE_HEARTBEAT = b": heartbeat\n\n"


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals of a stream, in seconds."""

    reread_s: float = 1.0
    """How often one query looks for commits of other processes; see `changes.watch_other_writers`."""
    heartbeat_s: float = 15.0
    """A comment is sent after this time without data, to keep proxies open and to notice dead clients."""
    refresh_s: float = 0.5
    """Smallest interval between two states; histories have no such limit."""


DEFAULT_PACE = Pace()


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of one read."""

    chunks: tuple[bytes, ...]
    more: bool = False
    """The store has more: read again without waiting."""
    ended: bool = False
    """There will be no further items."""


Follower: TypeAlias = AsyncIterator[Batch] | Iterator[Batch]
"""Each step reads what has come since the step before: on the event loop, or on a worker thread if it is not async."""


class Stream(StreamingResponse):
    """A response that lasts as long as its client listens, so it is counted but not timed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with scope[LIMITER].stream(scope):
                scope[OPEN_ENDED] = STREAM
                self.body_iterator = _while_valid(self.body_iterator, scope[STILL_VALID])
                await super().__call__(scope, receive, send)
        except TooManyRequests as error:
            await problem_response(error, scope["path"])(scope, receive, send)


def sse_response(
    changes: Changes, job_id: str | None, follower: Follower, pace: Pace, *, min_gap_s: float = 0.0
) -> StreamingResponse:
    """Answer with events of one job, or of all jobs (None); at most one read in each interval of `min_gap_s`
    seconds."""
    chunks = _follow(changes, job_id, follower, pace, min_gap_s, opening=_SSE_OPENING, heartbeat=_SSE_HEARTBEAT)
    return Stream(chunks, media_type=EVENT_STREAM, headers={"X-Accel-Buffering": "no"})


def text_response(changes: Changes, job_id: str, follower: Follower, pace: Pace) -> StreamingResponse:
    return Stream(_follow(changes, job_id, follower, pace, 0.0), media_type="text/plain")


def sse_event(data: str, *, event_id: int | str | None = None, event: str | None = None) -> bytes:
    """Return one server-sent event; `data` is JSON text in one line."""
    lines = [f"id: {event_id}\n" if event_id is not None else "", f"event: {event}\n" if event else ""]
    return f"{''.join(lines)}data: {data}\n\n".encode()


async def _follow(
    changes: Changes,
    job_id: str | None,
    follower: Follower,
    pace: Pace,
    min_gap_s: float,
    *,
    opening: bytes = b"",
    heartbeat: bytes = b"",
) -> AsyncIterator[bytes]:
    if opening:
        yield opening
    batches = iterate_in_threadpool(follower) if isinstance(follower, Iterator) else follower
    with changes.watching(job_id) as watch, changes.watching(NO_JOB) as closing:
        sent_mono = time.monotonic()
        changed = True
        while not changes.closing:
            if changed:
                watch.clear()
                batch = await anext(batches)
                if batch.chunks:
                    yield b"".join(batch.chunks)
                    sent_mono = time.monotonic()
                if batch.ended:
                    return
                if batch.more:
                    continue
                if batch.chunks and min_gap_s:
                    await closing.wait_at_most(_until_tick_s(time.monotonic(), min_gap_s))
            changed = await watch.wait_at_most(max(0.0, sent_mono + pace.heartbeat_s - time.monotonic()))
            if not changed:
                sent_mono = time.monotonic()
                yield heartbeat  # of a text it is empty: nothing is sent, but `_while_valid` looks


async def _while_valid(chunks: AsyncIterable[Any], still_valid: Callable[[], Awaitable[bool]]) -> AsyncIterator[Any]:
    """Yield the chunks, but end before the next one once the token of the request was revoked or has expired."""
    async for chunk in chunks:
        if not await still_valid():
            return
        yield chunk


def _until_tick_s(now_mono: float, every_s: float) -> float:
    """Return the seconds until the next tick. All streams have the same ticks, so clients that read together are
    equally far and get the same bytes."""
    return every_s - now_mono % every_s


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
        gone.add_done_callback(lambda _: watch.set())  # else a client that has gone is noticed at the deadline
    try:
        while True:
            watch.clear()
            result = await run_in_threadpool(read)
            left_s = deadline_mono - loop.time()
            if is_answer(result) or left_s <= 0 or changes.closing or gone is None or gone.done():
                return result
            await watch.wait_at_most(min(left_s, reread_s))
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
