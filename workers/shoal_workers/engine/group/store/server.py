"""Serves a worker's rendezvous store, on one thread and one address.

    accepted --32 random bytes--> client        the client proves that it knows the key; until then it can do nothing
    proven   <--- requests, answers --->        until the client closes the connection

A connection that proves nothing and sends nothing may stay: the supervisor's liveness probe is one. Only when there are
`max_unproven` of them, the oldest is closed. Wrong bytes close a connection at once. Every worker starts a server, so
that any of them can become the next rank 0 without delay. Made by the worker's process, used by the engine.
"""

from __future__ import annotations

import functools
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from shoal_workers.engine.group.store.key_values import KeyValues
from shoal_workers.engine.group.store.messages import StoreAnswer, StoreRequest, take_frame
from shoal_workers.snapshot_store.transfer.wire import NONCE_BYTES, proof
from shoal_workers.sockets import set_up_connection

MAX_CONNECTIONS = 16_384
_MAX_UNPROVEN = 256
_PROOF_S = 2.0
_READ_BYTES = 1 << 16
_BACKLOG = 1024
_PAUSE_S = 0.05

_log = logging.getLogger(__name__)


class StoreServer:
    """Listens from its construction on; its thread is a daemon.

    Args:
        host: numeric address of this host on which it listens; never a name, never all interfaces.
        key: shared secret of the attempt.
        max_unproven: how many connections that have not proved that they know the key may be open.
        proof_s: each of them keeps its place for at least this long.
    """

    def __init__(self, host: str, key: str, *, max_unproven: int = _MAX_UNPROVEN, proof_s: float = _PROOF_S) -> None:
        self.host = host
        self.key = key
        self._max_unproven = max_unproven
        self._proof_s = proof_s
        self._store: KeyValues[_Connection] = KeyValues()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._connections: set[_Connection] = set()
        self._unproven: dict[_Connection, float] = {}
        """Connections that have not proved that they know the key, and since when; oldest first."""
        try:
            self._wake, self._woken = socket.socketpair()
            self._selector = selectors.DefaultSelector()
        except OSError:  # no file descriptor is free
            self._listener.close()
            raise
        for handle in (self._listener, self._woken):
            self._selector.register(handle, selectors.EVENT_READ)
        self._stopped = threading.Event()
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="shoal-store", daemon=True)
        self._thread.start()

    @property
    def num_keys(self) -> int:
        """Returns, on any thread, the keys of all generations that are still kept."""
        return self._store.num_keys

    def close(self) -> None:
        """Called from any thread but the server's own: returns when the thread has ended. Idempotent."""
        with self._closing:
            if not self._stopped.is_set():
                self._stopped.set()
                self._wake.send(b"x")  # its other end stays open until the join: an awake thread may be gone already
                self._thread.join()
                self._wake.close()
                self._woken.close()

    def _serve(self) -> None:
        try:
            while not self._stopped.is_set():
                for key, events in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _Connection):
                        self._guard(key.data, functools.partial(self._advance, key.data, events))
                # The requests above may have ended waits of other clients.
                for client, answer in self._store.ready():
                    self._guard(client, functools.partial(self._answer, client, answer))
        finally:
            for connection in tuple(self._connections):
                self._close(connection)
            self._listener.close()
            self._selector.close()

    def _accept(self) -> None:
        if len(self._unproven) >= self._max_unproven:
            oldest, since = next(iter(self._unproven.items()))
            if time.monotonic() - since < self._proof_s:
                self._stopped.wait(_PAUSE_S)  # the others wait in the listener's queue
                return
            self._close(oldest)
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                _log.warning("rendezvous_store.accept_failed", exc_info=True)
                self._stopped.wait(_PAUSE_S)  # most likely no file descriptor is free
            return
        try:
            if len(self._connections) >= MAX_CONNECTIONS:
                raise OSError(f"there are {MAX_CONNECTIONS} connections already")
            sock.setblocking(False)
            set_up_connection(sock)
            connection = _Connection(sock)
            self._selector.register(sock, selectors.EVENT_READ, connection)
        except OSError as error:  # or the client has gone again
            _log.warning("rendezvous_store.connection_refused", extra={"error": str(error)})
            sock.close()
            return
        self._connections.add(connection)
        self._unproven[connection] = time.monotonic()
        self._guard(connection, functools.partial(self._send, connection, connection.nonce))

    def _guard(self, connection: _Connection, serve: Callable[[], None]) -> None:
        """The boundary of a connection: whatever fails on one of them ends that one only."""
        try:
            serve()
        except ValueError as error:
            _log.warning("rendezvous_store.connection_refused", extra={"error": str(error)})
            self._close(connection)
        except Exception:
            _log.exception("rendezvous_store.request_failed")
            self._close(connection)

    def _advance(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(connection, b"")
        if not events & selectors.EVENT_READ or connection not in self._connections:
            return
        try:
            data = connection.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # the client died
            data = b""
        if not data:
            self._close(connection)
            return
        connection.received += data
        self._take_messages(connection)

    def _take_messages(self, connection: _Connection) -> None:
        """ValueError: the client does not know the key, or sends something else than requests."""
        if connection in self._unproven:
            if len(connection.received) < 2 * NONCE_BYTES:
                return
            answer = bytes(connection.received[: 2 * NONCE_BYTES])
            del connection.received[: 2 * NONCE_BYTES]
            nonces = connection.nonce + answer[:NONCE_BYTES]
            if not hmac.compare_digest(answer[NONCE_BYTES:], proof(self.key, b"client", nonces)):
                raise ValueError("it does not know this attempt's key")
            del self._unproven[connection]
            self._send(connection, proof(self.key, b"server", nonces))
        while connection in self._connections and (fields := take_frame(connection.received)) is not None:
            replies = self._store.apply(connection, StoreRequest.parse(fields))
            if replies is not None:
                self._answer(connection, replies)

    def _answer(self, connection: _Connection, answer: StoreAnswer) -> None:
        self._send(connection, answer.pack())

    def _send(self, connection: _Connection, data: bytes) -> None:
        """Sends as much as the socket takes; the rest follows when it is writable."""
        if connection not in self._connections:
            return
        connection.unsent += data
        try:
            while connection.unsent:
                del connection.unsent[: connection.sock.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the client died
            self._close(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.sock, events, connection)

    def _close(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._unproven.pop(connection, None)
        self._store.forget(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()


class _Connection:
    """The server's end of one connection."""

    __slots__ = ("nonce", "received", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.received = bytearray()
        self.unsent = bytearray()
