"""Wakes a thread that is blocked in a gloo collective, by shutting down the sockets that gloo opened, and no others.

Nothing in torch's API wakes a rank that waits in gloo: abort, shutdown, destroy and a lower timeout do not (torch
2.13). `shutdown(2)` with SHUT_RD from a second thread does, within 12 to 60 ms. The rules:

- Only gloo's connections. They are known by address. gloo opens a new listening port for every group, so its ports are
  those that listen after the groups were made and did not before; the ranks exchange theirs through the store. A
  connection is gloo's if its local address is one of this rank's ports or its remote address one of a peer's.
- Never a listening socket: gloo's listener thread would abort the whole process.
- SHUT_RD only: SHUT_RDWR leaves eight times as many ranks blocked.
- Repeatedly: about one time in 50 a sweep does not wake all ranks.

Called by `Group`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator

from shoal_workers.sockets import own_sockets

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
                connection.shutdown(socket.SHUT_RD)
                num_shut += 1
            except OSError:  # the peer has closed it already
                pass
        return num_shut

    def are_all_closed(self) -> bool:
        """No connection of gloo is left: nothing can be sent or received, so no buffer is written any more."""
        return next(self.connections(), None) is None

    def describe(self) -> list[str]:
        """Each open connection: local -> remote address."""
        found = []
        for connection in self.connections():
            try:
                ends = _plain(connection.getsockname()), _plain(connection.getpeername())
            except OSError:
                continue
            found.append(" -> ".join(f"{host}:{port}" for host, port in ends))
        return found

    def connections(self) -> Iterator[socket.socket]:
        """The connections of this generation: duplicates, each closed before the next one is yielded."""
        own = self._own
        if not own and self._listening_before is not None:  # groups are being made right now
            own = listening_addresses() - self._listening_before
        for connection in own_sockets():
            try:
                local, remote = _plain(connection.getsockname()), _plain(connection.getpeername())
            except OSError:  # not connected: a listening socket, or already closed
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
