"""A TCP proxy whose connections a test cuts, holds or slows, as a network between a client and the service does."""

import contextlib
import queue
import socket
import threading
import time

_PIECE_BYTES = 16 << 10
_MOST_UNDER_WAY = 256
"""Pieces of a connection that the delay holds, in each direction."""


class Proxy:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`target`. While it is cut, or nothing listens there, connections end at
    once. While it is held, they stay open and nothing passes, as in a network that drops packets."""

    def __init__(self, target: int) -> None:
        self.target = target
        """Where connections go that are opened from now on."""
        self._passes = threading.Event()
        self._passes.set()
        self._is_cut = False
        self._bytes_per_s, self._delay_s = float("inf"), 0.0
        self._free_mono = {"there": 0.0, "back": 0.0}
        """When the link has passed on all that it was given, by direction."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Every connection ends, and new ones end at once."""
        with self._lock:
            self._is_cut = True
        self._end_all()

    def mend(self) -> None:
        with self._lock:
            self._is_cut = False

    def hold(self) -> None:
        """From now on nothing passes, in either direction. New connections are accepted, and nothing passes."""
        self._passes.clear()

    def release(self) -> None:
        """What was held passes now."""
        self._passes.set()

    def shape(self, bytes_per_s: float = float("inf"), delay_s: float = 0.0) -> None:
        """From now on all connections share this rate in each direction, and each piece arrives so much later, with
        others under way behind it. Without arguments the link is fast again."""
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s

    def redirect(self, target: int) -> None:
        """Connections that are open end."""
        self.target = target
        self._end_all()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._passes.set()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._connect, args=(near,), daemon=True))
            self._threads[-1].start()

    def _connect(self, near: socket.socket) -> None:
        """Both directions of one connection."""
        with near:
            self._passes.wait()
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return  # no service listens there
            with far:
                with self._lock:
                    if self._is_cut:
                        return
                    self._open |= {near, far}
                back = threading.Thread(target=self._pump, args=(far, near, "back"), daemon=True)
                back.start()
                self._pump(near, far, "there")
                back.join()
                with self._lock:
                    self._open -= {near, far}

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(_MOST_UNDER_WAY)
        delivery = threading.Thread(target=self._deliver, args=(under_way, source, sink), daemon=True)
        delivery.start()
        data = b" "
        while data:
            try:
                data = source.recv(_PIECE_BYTES)
            except OSError:
                data = b""
            self._passes.wait()
            with self._lock:
                free_mono = max(self._free_mono[direction], time.monotonic()) + len(data) / self._bytes_per_s
                self._free_mono[direction] = free_mono
            time.sleep(max(0.0, free_mono - time.monotonic()))
            under_way.put((free_mono + self._delay_s, data))
        delivery.join()
        _shut_down(source, sink)

    def _deliver(self, under_way: queue.Queue[tuple[float, bytes]], source: socket.socket, sink: socket.socket) -> None:
        """Pass on each piece when it arrives, up to the empty one."""
        while True:
            arrival_mono, data = under_way.get()
            if not data:
                return
            time.sleep(max(0.0, arrival_mono - time.monotonic()))
            self._passes.wait()
            try:
                sink.sendall(data)
            except OSError:
                _shut_down(source, sink)

    def _end_all(self) -> None:
        with self._lock:
            _shut_down(*self._open)


def _shut_down(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
