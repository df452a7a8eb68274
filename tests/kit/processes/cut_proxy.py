"""A TCP proxy whose connections a test cuts, as a network between a browser and the service does."""

from __future__ import annotations

import contextlib
import socket
import threading


class CutProxy:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`target`. While it is cut, or nothing listens there, connections end
    at once."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_cut = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Every connection ends, and new ones end at once."""
        with self._lock:
            self._is_cut = True
            self._end_all()

    def mend(self) -> None:
        with self._lock:
            self._is_cut = False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._is_cut:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._open |= {near, far}
            self._threads.append(threading.Thread(target=self._connect, args=(near, far), daemon=True))
            self._threads[-1].start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        """Both directions of one connection."""
        with near, far:
            back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
            back.start()
            self._pump(near, far)
            back.join()
            with self._lock:
                self._open -= {near, far}

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _end_all(self) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
