"""Wakes a thread that is blocked in a gloo collective, by shutting down the sockets that gloo made, and no others.

Nothing in torch's API frees a rank that waits in gloo: abort, shutdown, destroy and a lower timeout all do not (torch
2.13). `shutdown(2)` with SHUT_RD from a second thread does, in 12-60 ms. What must hold:

- Only gloo's connections. They are known by address: gloo opens a new listening port for every group, so its ports are
  those that listen after the groups were made and did not before; the peers' are exchanged through the store. A
  connection is gloo's if its local end is one of ours or its remote end one of theirs.
- Never a listening socket: gloo's listener thread aborts the whole process.
- SHUT_RD only; SHUT_RDWR leaves eight times as many ranks stuck.
- Again and again: about one time in 50 a sweep does not wake everybody.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator

from shoal_workers.sockets import own_sockets

Address = tuple[str, int]
_ANY = ("0.0.0.0", "::")


class GlooSockets:
    """The sockets of one generation. `sweep` is for any thread, everything else for the training thread."""

    def __init__(self) -> None:
        self._listening_before: frozenset[Address] | None = None
        self._own: frozenset[Address] = frozenset()
        self._peers: frozenset[Address] = frozenset()
        self._store: frozenset[Address] = frozenset()

    def watch_store(self, addresses: Iterable[Address]) -> None:
        """The rendezvous store's addresses: a thread may wait in it, too."""
        self._store = frozenset(addresses)

    def before_groups(self) -> None:
        """Right before the first group is made."""
        self._listening_before = listening_addresses()

    def after_groups(self) -> frozenset[Address]:
        """Right after the last group was made: the addresses that gloo listens on here, for the peers."""
        assert self._listening_before is not None
        self._own = listening_addresses() - self._listening_before
        return self._own

    def learn_peers(self, addresses: Iterable[Address]) -> None:
        self._peers = frozenset(addresses)

    def sweep(self) -> int:
        """Shut down what a thread of ours may wait for; returns how many connections that were."""
        num_shut = 0
        for connection, _ in self._connections():
            try:
                connection.shutdown(socket.SHUT_RD)
                num_shut += 1
            except OSError:  # the peer was faster
                pass
        return num_shut

    def are_all_closed(self) -> bool:
        """No connection of gloo is left: nothing can be sent or received, so no buffer is touched any more."""
        return all(is_store for _, is_store in self._connections())

    def describe(self) -> list[str]:
        """Each connection that is left: local -> remote address."""
        found = []
        for connection, is_store in self._connections():
            try:
                ends = _plain(connection.getsockname()), _plain(connection.getpeername())
            except OSError:
                continue
            found.append(" -> ".join(f"{host}:{port}" for host, port in ends) + (" (store)" if is_store else ""))
        return found

    def _connections(self) -> Iterator[tuple[socket.socket, bool]]:
        """This generation's, each with whether it leads to the store."""
        own = self._own
        if not own and self._listening_before is not None:  # groups are being made right now
            own = listening_addresses() - self._listening_before
        for connection in own_sockets():
            try:
                local, remote = _plain(connection.getsockname()), _plain(connection.getpeername())
            except OSError:  # not connected: a listener, or already gone
                continue
            if _matches(local, own) or _matches(remote, self._peers):
                yield connection, False
            elif _matches(remote, self._store):
                yield connection, True


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
