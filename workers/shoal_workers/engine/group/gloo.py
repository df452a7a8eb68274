"""gloo's connections: made within a deadline of seconds, known by their addresses, shut down to wake a thread,
measured. Hides what gloo lacks: its constructor cannot be interrupted, and nothing in torch's API wakes a rank that
waits in it.

    training thread   ProcessGroupGloo(...)  waits ............ Fenced
    helper thread     the real constructor: addresses, then one connection to each rank ... ends by its own timeout

Made: gloo connects every pair of ranks in the constructor. A rank that dies or stops before it connects leaves nothing
to shut down at its peers, which wait for the group's timeout: ten minutes. So the constructor, which is replaced here
once per worker, runs on a helper thread with a timeout of its own (`Assignment.connect_timeout_s`). A fenced training
thread leaves at once; the helper thread keeps the half-made group until that timeout, then frees it. Nothing is lost
with it: no tensor has been given to the group yet.

Woken: abort, shutdown, destroy and a lower timeout do not wake a rank that waits in gloo (torch 2.13). `shutdown(2)`
with SHUT_RD from a second thread does, within 12 to 60 ms. The rules:

- Only gloo's connections. gloo opens a new listening port for every group, so its ports are those that listen after
  the groups were made and did not before; the ranks exchange theirs through the store. A connection is gloo's if its
  local address is one of this rank's ports or its remote address one of a peer's.
- Never a listening socket, and only SHUT_RD.
- Repeatedly: about one time in 50 a sweep does not wake all ranks.

Measured: round trip times and segments that were sent again, from the kernel (tcp(7), TCP_INFO); on other systems than
Linux there is no answer. Called by `Group` and, once per worker, by the engine.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from shoal_workers.contract.suspects import Link
from shoal_workers.engine.generation_ends import FormFailed
from shoal_workers.sockets import own_sockets
from shoal_workers.torch_internals import ProcessGroupGloo

_SLICE_S = 0.02
_own = threading.local()


@dataclass(frozen=True, slots=True)
class _Limits:
    leave: Callable[[], None]
    timeout_s: float


@cache
def replace_constructor() -> None:
    """Replace the constructor of ProcessGroupGloo. Idempotent; called once per worker, before the first group is
    made."""
    plain = ProcessGroupGloo.__init__

    def construct(self: ProcessGroupGloo, *arguments: Any, **named: Any) -> None:
        limits: _Limits | None = getattr(_own, "limits", None)
        if limits is None or "timeout" not in named:
            plain(self, *arguments, **named)
            return
        # The shorter timeout is for connecting only: the group's collectives get the one that was asked for.
        final, named["timeout"] = named["timeout"], min(timedelta(seconds=limits.timeout_s), named["timeout"])
        _on_helper_thread(lambda: plain(self, *arguments, **named), limits)
        self._set_default_timeout(final)

    ProcessGroupGloo.__init__ = construct  # type: ignore[method-assign]


def shorten_addresses() -> None:
    """Make gloo exchange shorter addresses. Idempotent; called before the first group, because gloo reads the
    variables each time that it makes one. All ranks need the same values. A rank is known by its number then, which is
    enough: every group has a listening port of its own."""
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    os.environ.setdefault("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "1")


def _on_helper_thread(construct: Callable[[], None], limits: _Limits) -> None:
    """Raises what `construct` raises, or what `leave` raises, or FormFailed after the deadline, also if the wait of
    `construct` for another rank's address ended first. Without an end of `construct` the thread goes on alone: gloo
    applies its timeout to several attempts, one after the other."""
    deadline_mono = time.monotonic() + limits.timeout_s
    late = f"not all ranks have connected to this one within {limits.timeout_s:g} s"
    errors: list[BaseException] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            construct()
        except BaseException as error:
            errors.append(error)
        is_done.set()

    threading.Thread(target=run, name="shoal-connect", daemon=True).start()
    while not is_done.wait(_SLICE_S):
        limits.leave()
        # It may have ended since the wait: then its own result counts.
        if time.monotonic() > deadline_mono and not is_done.is_set():
            raise FormFailed(late)
    if errors:
        if isinstance(errors[0], RuntimeError) and time.monotonic() >= deadline_mono:
            raise FormFailed(f"{late}: {errors[0]}") from errors[0]
        raise errors[0]


@contextmanager
def bounded_connecting(leave: Callable[[], None], timeout_s: float) -> Iterator[None]:
    """Give each group that this thread makes within the block at most `timeout_s` to connect; then it raises
    FormFailed. `leave` may raise earlier, to end the wait."""
    _own.limits = _Limits(leave, timeout_s)
    try:
        yield
    finally:
        del _own.limits


Address = tuple[str, int]
_ANY = ("0.0.0.0", "::")


class GlooSockets:
    """The sockets of one generation. Any thread may call `sweep` and `describe`, only the training thread the rest."""

    def __init__(self) -> None:
        self._listening_before: frozenset[Address] | None = None
        self._own: frozenset[Address] = frozenset()
        self._peers: frozenset[Address] = frozenset()

    def before_groups(self) -> None:
        """Call right before the first group is made."""
        self._listening_before = listening_addresses()

    def after_groups(self) -> frozenset[Address]:
        """Call right after the last group was made. Returns the addresses that gloo listens on here, for the peers."""
        assert self._listening_before is not None
        self._own = listening_addresses() - self._listening_before
        return self._own

    def learn_peers(self, addresses: Iterable[Address]) -> None:
        self._peers = frozenset(addresses)

    def sweep(self) -> int:
        """Shut down all connections that the training thread may wait on. Returns their number."""
        num_shut = 0
        for connection in self.connections():
            try:
                # Not SHUT_RDWR: gloo may then wait for ever to send, which left eight times as many ranks blocked.
                connection.shutdown(socket.SHUT_RD)
                num_shut += 1
            except OSError:  # the peer has closed it already
                pass
        return num_shut

    def are_all_closed(self) -> bool:
        """Return whether no connection of gloo is left: then nothing can be sent or received, so no buffer is written
        any more."""
        return next(self.connections(), None) is None

    def describe(self) -> list[str]:
        """Return the remote address of each open connection, by local address."""
        descriptions = []
        for connection in self.connections():
            try:
                ends = _plain(connection.getsockname()), _plain(connection.getpeername())
            except OSError:
                continue
            descriptions.append(" -> ".join(f"{host}:{port}" for host, port in ends))
        return descriptions

    def connections(self) -> Iterator[socket.socket]:
        """The connections of this generation: duplicates, each closed before the next one is yielded."""
        own = self._own
        if not own and self._listening_before is not None:  # groups are being made right now
            own = listening_addresses() - self._listening_before
        for connection in own_sockets():
            try:
                local, remote = _plain(connection.getsockname()), _plain(connection.getpeername())
            except OSError:
                # Not connected: already closed, or a listening socket. That one must stay: if accept() fails, gloo's
                # listener thread aborts the whole process.
                continue
            if _matches(local, own) or _matches(remote, self._peers):
                yield connection


def listening_addresses() -> frozenset[Address]:
    """Addresses on which this process accepts connections."""
    return frozenset(
        _plain(listener.getsockname())
        for listener in own_sockets()
        if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _matches(address: Address, known: frozenset[Address]) -> bool:
    return address in known or any((host, address[1]) in known for host in _ANY)


def _plain(address: tuple[str | int, ...]) -> Address:
    host, port = str(address[0]), int(address[1])
    return host.removeprefix("::ffff:"), port


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
    """One per generation: `sample` is called now and then, `links` on request."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, _Counts]]] = deque(maxlen=3)

    def sample(self, connections: Iterable[socket.socket]) -> None:
        self._samples.append((time.monotonic(), _counts(connections)))

    def links(self, connections: Iterable[socket.socket]) -> tuple[Link, ...]:
        now, now_mono = _counts(connections), time.monotonic()
        earlier = next((counts for at, counts in reversed(self._samples) if now_mono - at >= _COMPARED_S), {})
        described = []
        for peer, counts in sorted(now.items()):
            before = earlier.get(peer, _Counts())
            sent, resent = counts.sent - before.sent, counts.resent - before.resent
            described.append(Link(peer_ip=peer, rtt_s=counts.rtt_s, sent=max(0, sent), resent=max(0, resent)))
        return tuple(described)


def _counts(connections: Iterable[socket.socket]) -> dict[str, _Counts]:
    counts_by_peer: dict[str, _Counts] = {}
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return counts_by_peer
    for connection in connections:
        try:
            peer = str(connection.getpeername()[0]).removeprefix("::ffff:")
            info = connection.getsockopt(socket.IPPROTO_TCP, option, _SIZE)
        except OSError:  # closed since
            continue
        if len(info) < _SIZE:  # an older kernel
            continue
        counts = counts_by_peer.setdefault(peer, _Counts())
        counts.rtt_s = max(counts.rtt_s, _word(info, _RTT) / 1e6)
        counts.sent += _word(info, _DATA_SENT)
        counts.resent += _word(info, _TOTAL_RESENT)
    return counts_by_peer


def _word(info: bytes, offset: int) -> int:
    return int(struct.unpack_from("=I", info, offset)[0])
