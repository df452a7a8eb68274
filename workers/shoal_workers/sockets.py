"""All TCP sockets of this process, including those of torch and Ray.

Every descriptor is duplicated before it is inspected. Otherwise another thread could close its number and reuse it in
between, and the wrong socket would be shut down. Called by `GlooSockets`, the rendezvous store and raylet.py.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator

_KEEP_ALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 60_000))
"""Seconds; the last one is in milliseconds."""


def own_sockets() -> Iterator[socket.socket]:
    """A duplicate of every TCP socket of this process, each closed before the next one is yielded."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - names only, many times a second
        try:
            descriptor = os.dup(int(name))
        except OSError:
            continue
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            duplicate = socket.socket(fileno=descriptor)
            descriptor = -1
            with duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                    yield duplicate
        except OSError:
            continue
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def shut_down_connections() -> None:
    """Call before the process ends, so that all peers notice it immediately.

    The kernel closes connections only after it has freed the memory: some tenths of a second later for a process with a
    gigabyte."""
    for connection in own_sockets():
        try:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # a listening socket, for which gloo would abort, or closed already
            continue


def set_up_connection(connection: socket.socket) -> None:
    """Set up a connection that lives long and carries small messages: no delay, and it ends if the peer's host is
    gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
