"""The HTTP protocol of a connection: uvicorn's, and a deadline for what the client has to send.

    head      complete within 10 s of the connection, or of its first byte on a kept-alive one; then 408
    body      never silent for 30 s, complete within 10 minutes

A body that the application does not read is not the client's delay. What is sent to the client has no deadline here:
streams last as long as the client reads.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds."""

    head_s: float = 10.0
    silence_s: float = 30.0
    body_s: float = 600.0


class PatientProtocol(H11Protocol):
    """Ends connections whose request does not arrive."""

    def __init__(self, patience: Patience, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._patience = patience
        self._timer: asyncio.TimerHandle | None = None
        self._awaits: object = None
        """What the timer is for: a state of h11, or None."""
        self._body_ends = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        if self.transport.is_closing() or state not in (h11.IDLE, h11.SEND_BODY):
            self._await_nothing()
        elif state is h11.SEND_BODY:
            self._await_body()
        elif self._awaits is not h11.IDLE:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_nothing()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        """A byte of it more does not move its deadline."""
        self._await_nothing()
        self._awaits = h11.IDLE
        self._timer = self.loop.call_later(self._patience.head_s, self._head_missing)

    def _await_body(self) -> None:
        now = self.loop.time()
        if self._awaits is not h11.SEND_BODY:
            self._body_ends = now + self._patience.body_s
        self._await_nothing()
        self._awaits = h11.SEND_BODY
        self._timer = self.loop.call_at(min(now + self._patience.silence_s, self._body_ends), self._body_missing)

    def _await_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._awaits = None

    def _head_missing(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TIMED_OUT)
            self.transport.close()

    def _body_missing(self) -> None:
        if self.flow.read_paused:
            self._awaits = None
            self._await_body()
        else:
            self.transport.close()
