"""Runs the HTTP server below the application: sockets, connections, clean stop.

It knows no route and no principal, and never reads a body.

    make_server       makes uvicorn end open streams before it waits for its connections. It shuts the application down
                      only after the last connection has closed, so an open event stream would delay that indefinitely
    GuardedListener   limits the connections of one address and in total, and accepts without a free descriptor
    TimedProtocol     sets deadlines for what the client has to send

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
_RESERVED_DESCRIPTORS = 96
"""Descriptors for the database, logs, processes and the rest of the server."""
_LOG_INTERVAL_S = 60.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
_log = logging.getLogger(__name__)
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits the connections. One beyond a limit is closed at once."""

    per_address: int = 512
    total: int = 4096
    proxies: str = ""
    """Addresses and networks without a limit per address, separated by commas; * is every one."""

    def limit_total(self, num_descriptors: int) -> int:
        """Return the total limit of a process with this number of descriptors."""
        return max(1, min(self.total, max(num_descriptors // 2, num_descriptors - _RESERVED_DESCRIPTORS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeouts:
    """Seconds that a client may take to send a request; see `TimedProtocol`."""

    head_s: float = 10.0
    idle_s: float = 30.0
    body_s: float = 600.0


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Settings of the connections to clients."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    trusted_proxies: str = ""
    """Proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; none if empty."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    timeouts: RequestTimeouts = field(default_factory=RequestTimeouts)

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
    http: HttpConfig = HttpConfig(),
) -> uvicorn.Server:
    """Make a server for an application of `create_app`.

    Call `run()` on the main thread, or await `serve()`.

    `log_requests`: one log event per request. `grace_s`: seconds that running requests have at the stop.
    """
    config = uvicorn.Config(
        app,
        http=partial(TimedProtocol, http.timeouts),  # type: ignore[arg-type]  # called as a class is
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
        ssl_certfile=http.tls_cert,
        ssl_keyfile=http.tls_key,
        proxy_headers=bool(http.trusted_proxies),
        forwarded_allow_ips=http.trusted_proxies,
    )
    return _Server(config, app.state, http)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, state: State, http: HttpConfig) -> None:
        super().__init__(config)
        self._changes: Changes = state.changes
        self._requests: RequestMetrics = state.requests
        self._http = http

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Take over these listening sockets, and serve on them."""
        http = self._http
        guarded: list[socket.socket] = [
            GuardedListener(listener, http.connections, self._requests.refusals.add, is_plain=http.tls_cert is None)
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
    """Takes over a listening socket, on one event loop. It closes a connection beyond the limits at once.

    The client gets a 503 first, if the connection is not encrypted.

    The accept loop of asyncio logs each failure and, in Python 3.11, goes on 2,048 times per wake-up. A server without
    a free descriptor logs hundreds of kilobytes a second and answers no request. This socket keeps one descriptor in
    reserve, with which it accepts and closes what it cannot serve.
    """

    def __init__(
        self,
        listening: socket.socket,
        limits: ConnectionLimits,
        count_refusal: Callable[[Limit], None],
        *,
        is_plain: bool,
    ) -> None:
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self._limits = limits
        self._count_refusal = count_refusal
        self._is_plain = is_plain
        self._max_total = limits.limit_total(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._proxies = _parse_networks(limits.proxies)
        self._open: Counter[str] = Counter()
        self._reserve: int | None = _open_null()
        self._logged_mono = -_LOG_INTERVAL_S

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection within the limits. Raises BlockingIOError if none waits."""
        while True:
            try:
                descriptor, address = self._accept()  # type: ignore[attr-defined]
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._refuse_next(error)
                continue
            host = str(address[0])
            connection = _CountedConnection(self, host, descriptor)
            reason = self._find_exceeded_limit(host)
            if reason is None:
                return connection, address
            self._count_refusal(Limit.CONNECTIONS)
            if self._is_plain:
                body = reason.encode()
                with suppress(OSError):  # this is the event loop: it cannot wait for a client that does not read
                    connection.send(_REFUSAL % (len(body), body), socket.MSG_DONTWAIT)
            connection.close()

    def close(self) -> None:
        self._close_reserve()
        super().close()

    def _close_reserve(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _find_exceeded_limit(self, host: str) -> str | None:
        """Describe the limit that a new connection exceeds; None if it exceeds none. It is counted already."""
        if self._open.total() > self._max_total:
            return f"The limit is {self._max_total} connections (SHOAL_LIMIT_CONNECTIONS, ulimit -n). Try again."
        if self._open[host] > self._limits.per_address and not self._is_proxy(host):
            limit = self._limits.per_address
            return f"The limit is {limit} connections of one address (SHOAL_LIMIT_ADDRESS_CONNECTIONS). Try again."
        return None

    def _is_proxy(self, host: str) -> bool:
        address = ipaddress.ip_address(host.partition("%")[0])
        return any(address in network for network in self._proxies)

    def _refuse_next(self, error: OSError) -> None:
        """Accept the next connection with the descriptor in reserve, because no other is free, and close it.

        Raises BlockingIOError if no connection waits.
        """
        self._close_reserve()
        try:
            descriptor, _ = self._accept()  # type: ignore[attr-defined]
            os.close(descriptor)
        except OSError as again:
            if again.errno in _EXHAUSTED:  # another thread took it
                raise BlockingIOError from again
            raise
        finally:
            with suppress(OSError):
                self._reserve = _open_null()
        self._count_refusal(Limit.CONNECTIONS)
        now_mono = time.monotonic()
        if now_mono - self._logged_mono >= _LOG_INTERVAL_S:
            self._logged_mono = now_mono
            _log.error("http.no_descriptors", extra={"reason": str(error), "connections": self._open.total()})


class _CountedConnection(socket.socket):
    """A connection that counts for its address until it is closed, also during its TLS handshake."""

    def __init__(self, listener: GuardedListener, host: str, descriptor: int) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=descriptor)
        self._host: str | None = host
        self._counts = listener._open
        self._counts[host] += 1

    def close(self) -> None:
        super().close()
        host, self._host = self._host, None
        if host is not None:
            self._counts[host] -= 1
            if not self._counts[host]:
                del self._counts[host]


def _parse_networks(proxies: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    if proxies == "*":
        proxies = "0.0.0.0/0, ::/0"
    return [ipaddress.ip_network(network.strip()) for network in proxies.split(",") if network.strip()]


def _open_null() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class TimedProtocol(H11Protocol):
    """Ends connections whose request does not arrive in time.

        head      complete within 10 s of the connection, or of its first byte on a kept-alive one; then 408
        body      some bytes every 30 s, complete within 10 minutes

    A body that the application does not read is not the client's delay. What is sent to the client has no deadline
    here: streams last as long as the client reads.
    """

    def __init__(self, timeouts: RequestTimeouts, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._timeouts = timeouts
        self._timer: asyncio.TimerHandle | None = None
        self._awaited_part: object = None
        """State of h11 whose deadline the timer is; None without a timer."""
        self._body_ends = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        if self.transport.is_closing() or state not in (h11.IDLE, h11.SEND_BODY):
            self._cancel_deadline()
        elif state is h11.SEND_BODY:
            self._extend_body_deadline()
        elif self._awaited_part is not h11.IDLE:
            self._start_head_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def _start_head_deadline(self) -> None:
        """Set the deadline for the head of a request. Further bytes of the head do not move it."""
        self._cancel_deadline()
        self._awaited_part = h11.IDLE
        self._timer = self.loop.call_later(self._timeouts.head_s, self._end_late_head)

    def _extend_body_deadline(self) -> None:
        now = self.loop.time()
        if self._awaited_part is not h11.SEND_BODY:
            self._body_ends = now + self._timeouts.body_s
        self._cancel_deadline()
        self._awaited_part = h11.SEND_BODY
        self._timer = self.loop.call_at(min(now + self._timeouts.idle_s, self._body_ends), self._end_late_body)

    def _cancel_deadline(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._awaited_part = None

    def _end_late_head(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TIMED_OUT)
            self.transport.close()

    def _end_late_body(self) -> None:
        if self.flow.read_paused:
            self._awaited_part = None
            self._extend_body_deadline()
        else:
            self.transport.close()
