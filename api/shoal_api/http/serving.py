"""The server below the application: its sockets, the connections on them, and its clean stop. It knows no route and no
principal, and never reads a body.

    make_server       uvicorn, which ends open streams before it waits for its connections: it shuts the application
                      down only after the last connection has closed, so an open event stream would delay that
                      indefinitely
    GuardedListener   how many connections there may be, of one address and in all, and what happens without descriptors
    PatientProtocol   uvicorn's protocol, and a deadline for what the client has to send

`shoal serve`, tests and benchmarks use `make_server`; `uvicorn --factory` needs `--timeout-graceful-shutdown`.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import State
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal_api.http.changes import Changes
from shoal_service.telemetry.tallies import Limit, RequestMetrics

_GRACE_S = 5
_BACKLOG = 2048
_OWN_DESCRIPTORS = 96
"""Descriptors for the database, logs, processes and the rest of the server."""
_SAY_S = 60.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
_log = logging.getLogger(__name__)
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How many connections there may be. One beyond a limit is closed at once."""

    of_address: int = 512
    in_all: int = 4096
    proxies: str = ""
    """Addresses and networks, separated by commas, that have the connections of many clients; * is every one."""

    def within(self, num_descriptors: int) -> int:
        """Return the limit of all connections in a process with this number of descriptors."""
        return max(1, min(self.in_all, max(num_descriptors // 2, num_descriptors - _OWN_DESCRIPTORS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that a client may take to send a request; see `PatientProtocol`."""

    head_s: float = 10.0
    silence_s: float = 30.0
    body_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Wire:
    """How the server speaks to its clients."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    trusted_proxies: str = ""
    """Proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; empty: none."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    patience: Patience = field(default_factory=Patience)

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"


def make_server(
    app: FastAPI,
    *,
    host: str,
    port: int,
    log_requests: bool = False,
    grace_s: int = _GRACE_S,
    wire: Wire = Wire(),
) -> uvicorn.Server:
    """Return a server for an application made by `create_app`; `run()` it on the main thread, or await `serve()`.

    `log_requests`: one log event per request. `grace_s`: seconds that running requests have at the stop.
    """
    config = uvicorn.Config(
        app,
        http=partial(PatientProtocol, wire.patience),  # type: ignore[arg-type]  # called as a class is
        host=host,
        port=port,
        log_config=None,  # the composition root sets up the logs
        log_level="info" if log_requests else "warning",
        access_log=log_requests,
        backlog=_BACKLOG,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        lifespan="on",
        ws="none",
        ssl_certfile=wire.tls_cert,
        ssl_keyfile=wire.tls_key,
        proxy_headers=bool(wire.trusted_proxies),
        forwarded_allow_ips=wire.trusted_proxies,
    )
    return _Server(config, app.state, wire)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, state: State, wire: Wire) -> None:
        super().__init__(config)
        self._changes: Changes = state.changes
        self._requests: RequestMetrics = state.requests
        self._wire = wire

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on these listening sockets, which are taken over."""
        wire = self._wire
        guarded: list[socket.socket] = [
            GuardedListener(listener, wire.connections, self._requests.refused, is_plain=wire.tls_cert is None)
            for listener in sockets or ()
        ]
        try:
            await super().serve(guarded or None)
        finally:
            for server in guarded:
                server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._changes.close()
        await super().shutdown(sockets)


class GuardedListener(socket.socket):
    """Takes over a listening socket, on one event loop. A connection that is too many is closed at once, with a 503 if
    it is not encrypted.

    asyncio's own accept loop logs each failure and, in Python 3.11, goes on 2,048 times per wake-up: a server without a
    free descriptor logs hundreds of kilobytes a second and answers no request. This socket keeps one descriptor in
    reserve, with which it accepts and closes what it cannot serve.
    """

    def __init__(
        self, listening: socket.socket, limits: ConnectionLimits, refused: Callable[[Limit], None], *, is_plain: bool
    ) -> None:
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self._limits = limits
        self._refused = refused
        self._is_plain = is_plain
        self._most = limits.within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._proxies = _networks(limits.proxies)
        self._open: Counter[str] = Counter()
        self._reserve: int | None = _null()
        self._said_mono = -_SAY_S

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection within the limits. Raises BlockingIOError if none waits."""
        while True:
            try:
                descriptor, address = self._accept()  # type: ignore[attr-defined]
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._drop_one(error)
                continue
            host = str(address[0])
            connection = _Counted(self, host, descriptor)
            reason = self._reason_against(host)
            if reason is None:
                return connection, address
            self._refused(Limit.CONNECTIONS)
            if self._is_plain:
                body = reason.encode()
                with suppress(OSError):  # this is the event loop: it cannot wait for a client that does not read
                    connection.send(_REFUSAL % (len(body), body), socket.MSG_DONTWAIT)
            connection.close()

    def close(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
        super().close()

    def _reason_against(self, host: str) -> str | None:
        """Say which limit the connection exceeds; None if it exceeds none. It is counted already."""
        if self._open.total() > self._most:
            return f"The limit is {self._most} connections (SHOAL_LIMIT_CONNECTIONS, ulimit -n). Try again."
        if self._open[host] > self._limits.of_address and not self._is_proxy(host):
            most = self._limits.of_address
            return f"The limit is {most} connections of one address (SHOAL_LIMIT_ADDRESS_CONNECTIONS). Try again."
        return None

    def _is_proxy(self, host: str) -> bool:
        address = ipaddress.ip_address(host.partition("%")[0])
        return any(address in network for network in self._proxies)

    def _drop_one(self, error: OSError) -> None:
        """Take the next connection with the descriptor in reserve, because no other is free, and close it. Raises
        BlockingIOError if no connection waits."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
        try:
            descriptor, _ = self._accept()  # type: ignore[attr-defined]
            os.close(descriptor)
        except OSError as again:
            if again.errno in _EXHAUSTED:  # another thread took it
                raise BlockingIOError from again
            raise
        finally:
            with suppress(OSError):
                self._reserve = _null()
        self._refused(Limit.CONNECTIONS)
        now_mono = time.monotonic()
        if now_mono - self._said_mono >= _SAY_S:
            self._said_mono = now_mono
            _log.error("http.no_descriptors", extra={"reason": str(error), "connections": self._open.total()})


class _Counted(socket.socket):
    """A connection that counts for its address until it is closed, its TLS handshake included."""

    def __init__(self, listener: GuardedListener, host: str, descriptor: int) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=descriptor)
        self._of: tuple[Counter[str], str] | None = (listener._open, host)
        listener._open[host] += 1

    def close(self) -> None:
        super().close()
        if self._of is not None:
            (counts, host), self._of = self._of, None
            counts[host] -= 1
            if not counts[host]:
                del counts[host]


def _networks(proxies: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    if proxies == "*":
        proxies = "0.0.0.0/0, ::/0"
    return [ipaddress.ip_network(network.strip()) for network in proxies.split(",") if network.strip()]


def _null() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class PatientProtocol(H11Protocol):
    """Ends connections whose request does not arrive.

        head      complete within 10 s of the connection, or of its first byte on a kept-alive one; then 408
        body      never silent for 30 s, complete within 10 minutes

    A body that the application does not read is not the client's delay. What is sent to the client has no deadline
    here: streams last as long as the client reads.
    """

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
        """Set the deadline for the head of a request. Further bytes of the head do not move it."""
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
