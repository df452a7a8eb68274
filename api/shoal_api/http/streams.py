"""Streams that follow a job: server-sent events, or plain text, fed by a follower that re-reads the store on changes.

A stream sends everything in order and exactly once, from the position that the client names. It ends when its follower
says that all is out, when the client leaves, or when the application closes; only the first of these is marked (`end`),
so a client knows when to come back.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from shoal_api.http.changes import Changes

EVENT_STREAM = "text/event-stream"
_SSE_OPENING = b"retry: 1000\n\n"
_SSE_HEARTBEAT = b": heartbeat\n\n"


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a stream does something although nothing has happened, and at most when much happens. Seconds."""

    reread_s: float = 1.0
    """Another process may have written to the store."""
    heartbeat_s: float = 15.0
    """Proxies and dead peers are found by writing."""
    refresh_s: float = 0.5
    """Streams of a state (not of a history) are not sent more often."""


DEFAULT_PACE = Pace()


@dataclass(frozen=True, slots=True)
class Batch:
    """What one reading of the store gave."""

    chunks: tuple[bytes, ...]
    more: bool = False
    """There was more than one reading takes: read again at once."""
    ended: bool = False
    """Nothing will follow."""


class Follower(Protocol):
    """Reads on from its own position. Called on worker threads, never twice at the same time."""

    def read(self) -> Batch: ...


def sse_response(
    changes: Changes, job_id: str | None, follower: Follower, pace: Pace, *, min_gap_s: float = 0.0
) -> StreamingResponse:
    """Events of one job, or of all of them (None); readings are at least `min_gap_s` apart."""
    chunks = _follow(changes, job_id, follower, pace, min_gap_s, opening=_SSE_OPENING, heartbeat=_SSE_HEARTBEAT)
    return StreamingResponse(chunks, media_type=EVENT_STREAM, headers={"X-Accel-Buffering": "no"})


def text_response(changes: Changes, job_id: str, follower: Follower, pace: Pace) -> StreamingResponse:
    return StreamingResponse(_follow(changes, job_id, follower, pace, 0.0), media_type="text/plain")


def sse_event(data: str, *, event_id: int | None = None, event: str | None = None) -> bytes:
    """One server-sent event; `data` is JSON text in one line."""
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
    with changes.watching(job_id) as watch, changes.watching(_NOBODY) as closing:
        sent_mono = time.monotonic()
        while not changes.closing:
            watch.arm()
            batch = await run_in_threadpool(follower.read)
            if batch.chunks:
                yield b"".join(batch.chunks)
                sent_mono = time.monotonic()
            if batch.ended:
                return
            if batch.more:
                continue
            if batch.chunks and min_gap_s:
                await closing.wait(min_gap_s)
            await watch.wait(pace.reread_s)
            if heartbeat and time.monotonic() - sent_mono >= pace.heartbeat_s:
                yield heartbeat
                sent_mono = time.monotonic()


_NOBODY = ""
"""No job has this id: such a watch is woken by the closing of the application only."""
