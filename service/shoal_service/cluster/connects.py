"""TCP connects to hosts and ports: whether a host answers, whether a program listens, and which port is free.

`core/reachability.py` says what the answer of a host means. `gateway/ray_cluster.py` asks about the host of a
supervisor that is late, and whether the port of the head is open. The supervisor watches the hosts of its workers all
the time, with `supervisor/workers/probes.py`.
"""

from __future__ import annotations

import errno
import select
import socket
import time

from shoal_service.core.reachability import HURRIED_S


def answers(host: str, port: int, *, within_s: float) -> bool:
    """Return whether the host accepted or refused one of the connects that are made every 0.2 s.

    Blocks until the first answer, `within_s` at most.
    """
    give_up = time.monotonic() + within_s
    poll = select.poll()
    attempts: dict[int, socket.socket] = {}
    try:
        while (left_s := give_up - time.monotonic()) > 0:
            attempt = open_socket(host)
            attempts[attempt.fileno()] = attempt
            if _is_answer(attempt.connect_ex((host, port))):
                return True
            poll.register(attempt, select.POLLOUT)
            for number, _ in poll.poll(1e3 * min(left_s, HURRIED_S)):
                if _is_answer(attempts[number].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    return True
                poll.unregister(number)
        return False
    finally:
        for attempt in attempts.values():
            attempt.close()


def open_socket(host: str) -> socket.socket:
    """Open a socket that can connect to the host, and does not block."""
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    opened.setblocking(False)
    return opened


def listens(address: str) -> bool:
    """Return whether a process accepts connections at this address, host:port."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError:
        return False
    return True


def find_free_port() -> int:
    """Return a port of 127.0.0.1 that no process uses now. Another process may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_answer(code: int) -> bool:
    return code in (0, errno.ECONNREFUSED)
