"""The TCP sockets of this process, whoever opened them.

Every descriptor is duplicated before it is looked at, so that a number which is closed and reused meanwhile by another
thread is never the one that gets shut.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator


def own_sockets() -> Iterator[socket.socket]:
    """A duplicate of every TCP socket of this process, each closed again after its turn."""
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


def hang_up() -> None:
    """Before the process ends: whoever is at the other end of a connection hears of it now. By itself the kernel closes
    them only once it has taken the memory apart, tenths of a second later for a process with a gigabyte."""
    for connection in own_sockets():
        try:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # a listener, which gloo would abort for, or gone already
            continue
