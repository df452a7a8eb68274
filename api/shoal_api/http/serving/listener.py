"""The listening socket: how many connections there may be, of one address and in all, and what happens without
descriptors. A connection that is too many is closed at once, with a 503 if it is not encrypted.

asyncio's own accept loop logs each failure and, in Python 3.11, goes on 2,048 times per wake-up: a server without a
free descriptor logs hundreds of kilobytes a second and answers no request. This socket keeps one descriptor in reserve,
with which it accepts and closes what it cannot serve. Used on one event loop.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from typing import Any

from shoal_service.telemetry.request_metrics import Limit

_OWN_DESCRIPTORS = 96
"""Descriptors for the database, logs, processes and the rest of the server."""
_SAY_S = 60.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Beyond them a connection is closed at once."""

    of_address: int = 512
    in_all: int = 4096
    proxies: str = ""
    """Addresses and networks, separated by commas, that have the connections of many clients; * is every one."""

    def within(self, num_descriptors: int) -> int:
        """The limit of all connections in a process with this number of descriptors."""
        return max(1, min(self.in_all, max(num_descriptors // 2, num_descriptors - _OWN_DESCRIPTORS)))


class GuardedListener(socket.socket):
    """Takes over a listening socket."""

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
        """A connection within the limits. Raises BlockingIOError: there is none."""
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
                with suppress(OSError):
                    connection.send(_REFUSAL % (len(body), body), socket.MSG_DONTWAIT)
            connection.close()

    def close(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
        super().close()

    def _reason_against(self, host: str) -> str | None:
        """The connection is counted already."""
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
        """Without a free descriptor: takes the next connection with the one in reserve, and closes it. Raises
        BlockingIOError: no connection waits."""
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
    """Counts as a connection of its address until it is closed, a TLS handshake included."""

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
    return [ipaddress.ip_network(one.strip()) for one in proxies.split(",") if one.strip()]


def _null() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
