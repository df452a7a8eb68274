"""Follows a server-sent event stream across broken connections: every event once and in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from shoal_api.client.errors import Disconnected, ServerError
from shoal_api.client.transport import Transport


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    id: str
    event: str
    data: str


def follow(transport: Transport, path: str, params: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
    """Yield all events of a numbered stream until its `end` event, which is not yielded.

    A broken stream is reopened after the last number that was yielded (Last-Event-ID). The function gives up after
    several failures in a row without an event in between.

    Raises:
        ApiError, Disconnected
    """
    last_id = 0
    failures = 0
    while True:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(last_id)} if last_id else {})
        cause = "the stream ended early"
        try:
            with transport.stream(path, params=params, headers=headers) as response:
                for event in parse(lines_of(response.iter_bytes())):
                    if event.event == "end":
                        return
                    failures = 0
                    if event.id:
                        if int(event.id) <= last_id:
                            continue
                        last_id = int(event.id)
                    yield event
        except httpx.TransportError as error:
            cause = str(error) or type(error).__name__
        except ServerError as error:
            if error.problem.status != 503:
                raise
            cause = error.problem.title
        failures += 1
        if transport.gives_up(failures):
            raise Disconnected(transport.base_url, cause)
        transport.back_off(failures)


def parse(lines: Iterator[str]) -> Iterator[ServerSentEvent]:
    """Parse a stream as the WHATWG HTML standard (9.2.6) defines it; an incomplete event at the end is dropped."""
    event_id, event = "", ""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield ServerSentEvent(event_id, event or "message", "\n".join(data))
            event, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            event = value
        elif field == "id":
            event_id = value


def lines_of(chunks: Iterator[bytes]) -> Iterator[str]:
    """Split at LF only: the text may contain other characters that Unicode defines as line ends."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode()
