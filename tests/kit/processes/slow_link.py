"""A link to a worker's snapshot server that lets some connections through, and holds back the end of all later ones."""

import socket
import threading
from dataclasses import dataclass, field

from shoal_workers.contract.snapshots import SnapshotServer

_CHUNK_BYTES = 64 << 10
_HELD_BACK_BYTES = 256


@dataclass
class _Connection:
    near: socket.socket
    far: socket.socket
    most_bytes: int | None
    """The near side's bytes beyond this number are held back; None: none are."""
    forwarded_bytes: int = field(default=0)


class SlowLink:
    """Stands before `server`; `snapshot_server` is its own address. A copy over a connection that is held back has
    begun at the server and never ends there."""

    def __init__(self, server: SnapshotServer, *, let_through: int) -> None:
        self.holds_back = threading.Event()
        """A connection has sent all that is let through of it."""
        self._server = server
        self._let_through = let_through
        self._connections: list[_Connection] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def snapshot_server(self) -> SnapshotServer:
        return self._server.model_copy(update={"port": self._listener.getsockname()[1]})

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.near.close()
            connection.far.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._server.host, self._server.port))
            except OSError:
                return
            is_free = len(self._connections) < self._let_through
            most = None if is_free else self._connections[-1].forwarded_bytes - _HELD_BACK_BYTES
            connection = _Connection(near, far, most)
            self._connections.append(connection)
            threading.Thread(target=self._forward, args=(connection,), daemon=True).start()
            threading.Thread(target=_pump, args=(far, near), daemon=True).start()

    def _forward(self, connection: _Connection) -> None:
        try:
            while data := connection.near.recv(_CHUNK_BYTES):
                if (
                    connection.most_bytes is not None
                    and connection.forwarded_bytes + len(data) >= connection.most_bytes
                ):
                    data = data[: max(0, connection.most_bytes - connection.forwarded_bytes)]
                connection.far.sendall(data)
                connection.forwarded_bytes += len(data)
                if connection.forwarded_bytes == connection.most_bytes:
                    self.holds_back.set()
        except OSError:
            pass


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
    except OSError:
        pass
