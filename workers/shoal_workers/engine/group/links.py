"""What the kernel knows of the connections to the other nodes: round trip times and segments that were sent again.

`GlooSockets` names the connections; see tcp(7), TCP_INFO. Any thread. On other systems than Linux there is no answer.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shoal_workers.contract.errors.suspects import Link

_SIZE = 160
_RTT, _TOTAL_RESENT, _DATA_SENT = 8 + 15 * 4, 8 + 23 * 4, 156
"""Offsets in struct tcp_info: tcpi_rtt, tcpi_total_retrans, tcpi_data_segs_out."""
_COMPARED_S = 2.0
"""The counters are compared with those of at least this long ago."""


@dataclass(slots=True)
class _Counts:
    rtt_s: float = 0.0
    sent: int = 0
    resent: int = 0


class LinkMeter:
    """One per generation: `sample` is called now and then, `links` when somebody wants to know."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, _Counts]]] = deque(maxlen=3)

    def sample(self, connections: Iterable[socket.socket]) -> None:
        self._samples.append((time.monotonic(), _counts(connections)))

    def links(self, connections: Iterable[socket.socket]) -> tuple[Link, ...]:
        now, now_mono = _counts(connections), time.monotonic()
        earlier = next((counts for at, counts in reversed(self._samples) if now_mono - at >= _COMPARED_S), {})
        found = []
        for peer, counts in sorted(now.items()):
            before = earlier.get(peer, _Counts())
            sent, resent = counts.sent - before.sent, counts.resent - before.resent
            found.append(Link(peer_ip=peer, rtt_s=counts.rtt_s, sent=max(0, sent), resent=max(0, resent)))
        return tuple(found)


def _counts(connections: Iterable[socket.socket]) -> dict[str, _Counts]:
    found: dict[str, _Counts] = {}
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return found
    for connection in connections:
        try:
            peer = str(connection.getpeername()[0]).removeprefix("::ffff:")
            info = connection.getsockopt(socket.IPPROTO_TCP, option, _SIZE)
        except OSError:  # closed since
            continue
        if len(info) < _SIZE:  # an older kernel
            continue
        counts = found.setdefault(peer, _Counts())
        counts.rtt_s = max(counts.rtt_s, _word(info, _RTT) / 1e6)
        counts.sent += _word(info, _DATA_SENT)
        counts.resent += _word(info, _TOTAL_RESENT)
    return found


def _word(info: bytes, offset: int) -> int:
    return int(struct.unpack_from("=I", info, offset)[0])
