"""Asks for a moment whether a host answers connects. `core/reachability.py` says what an answer means.

Called by `gateway/ray_cluster.py` about the host of a supervisor that is late. The supervisor watches the
hosts of its workers all the time, with `supervisor/workers/probes.py`.
"""

from __future__ import annotations

import errno
import select
import socket
import time

from shoal_service.core.reachability import HURRIED_S


def answers(host: str, port: int, *, within_s: float) -> bool:
    """One of the connects, made every 0.2 s, was accepted or refused. Blocks until the first answer, `within_s` at
    most."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    give_up = time.monotonic() + within_s
    poll = select.poll()
    attempts: dict[int, socket.socket] = {}
    try:
        while (left_s := give_up - time.monotonic()) > 0:
            attempt = socket.socket(family, socket.SOCK_STREAM)
            attempts[attempt.fileno()] = attempt
            attempt.setblocking(False)
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


def _is_answer(code: int) -> bool:
    return code in (0, errno.ECONNREFUSED)
