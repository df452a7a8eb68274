"""A client's connection to a rendezvous store: one request at a time, in waits that another thread can end.

`wake` makes a waiting request call its `check` at once. A request that `check` ends leaves the connection intact: the
next request has another number, and a late answer is dropped. So a connection outlives the generation that made it.
Used by `GenerationStore`.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable

from shoal_workers.engine.group.store.messages import Operation, Space, StoreAnswer, StoreRequest, take_frame
from shoal_workers.snapshot_store.transfer.wire import Wire, wait_for
from shoal_workers.sockets import set_up_connection

Address = tuple[str, int]
_CHECK_S = 1.0
"""Between two calls of `check` if the wait is not woken."""
_READ_BYTES = 1 << 16


class StoreConnection:
    """A proven connection. Any thread may call it; requests of several threads follow one another.

    Args:
        address: numeric; a name is refused with OSError.

    Raises:
        OSError: the store does not answer, or does not know the key.
    """

    def __init__(self, address: Address, key: str, *, check: Callable[[], None], patience_s: float) -> None:
        self.address = address
        self._key = key
        self._patience_s = patience_s
        self._busy = threading.Lock()
        self._number = 0
        self._received = bytearray()
        self._socket = _connected(address, check, patience_s)
        try:
            Wire(self._socket, check=check, patience_s=patience_s).prove(key)
            self._socket.setblocking(False)  # the proof lets the kernel wait
            set_up_connection(self._socket)
            self._wake, self._woken = socket.socketpair()
        except BaseException:
            self._socket.close()
            raise
        self._wake.setblocking(False)
        self._woken.setblocking(False)

    def request(
        self,
        operation: Operation,
        space: Space,
        operands: tuple[bytes, ...],
        *,
        check: Callable[[], None],
        deadline_mono: float,
    ) -> StoreAnswer:
        """TimeoutError after the deadline, ConnectionError if the store is gone, or what `check` raises."""
        with self._busy:
            self._number += 1
            request = StoreRequest(self._number, operation, space, operands)
            self._send(request.pack(), check, deadline_mono)
            while True:
                answer = self._take_answer()
                if answer is not None and answer.number == self._number:
                    return answer
                if answer is None:
                    self._receive(check, deadline_mono)

    def wake(self) -> None:
        """Any thread: the waiting request, or the next one, calls its `check` now."""
        try:
            self._wake.send(b"x")
        except OSError:  # enough wake-ups are waiting already, or it is closed
            pass

    def another(self, check: Callable[[], None]) -> StoreConnection:
        """To the same store, for requests that do not wait for those of this one. OSError: it does not answer."""
        return StoreConnection(self.address, self._key, check=check, patience_s=self._patience_s)

    @property
    def is_idle(self) -> bool:
        """No request is under way, and the store has not closed the connection."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            return not self._received and not _is_ready(self._socket, select.POLLIN)
        finally:
            self._busy.release()

    def close(self) -> None:
        """A request under way ends with ConnectionError."""
        self._break()
        with self._busy:
            for one in (self._socket, self._wake, self._woken):
                one.close()

    def _send(self, data: bytes, check: Callable[[], None], deadline_mono: float) -> None:
        """Sends all of it, or breaks the connection: half a message would spoil those that follow."""
        view = memoryview(data)
        try:
            while view:
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, check, deadline_mono)
        except BaseException:
            self._break()
            raise

    def _break(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the store was first
            pass

    def _receive(self, check: Callable[[], None], deadline_mono: float) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            self._wait(select.POLLIN, check, deadline_mono)
            return
        if not data:
            raise ConnectionError("the store closed the connection")
        self._received += data

    def _take_answer(self) -> StoreAnswer | None:
        try:
            fields = take_frame(self._received)
            return None if fields is None else StoreAnswer.parse(fields)
        except ValueError as error:
            self._break()
            raise ConnectionError(f"the store sent something else than an answer: {error}") from None

    def _wait(self, event: int, check: Callable[[], None], deadline_mono: float) -> None:
        check()
        left_s = deadline_mono - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        poll = select.poll()
        poll.register(self._socket, event)
        poll.register(self._woken, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * min(left_s, _CHECK_S)):
            if descriptor == self._woken.fileno():
                self._woken.recv(_READ_BYTES)
        check()


def _connected(address: Address, check: Callable[[], None], patience_s: float) -> socket.socket:
    """Never asks a name server: the address is parsed as a number."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    socket.inet_pton(family, address[0].partition("%")[0])  # OSError for a name
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setblocking(False)
        try:
            sock.connect(address)
        except BlockingIOError:
            wait_for(sock, select.POLLOUT, check=check, patience_s=patience_s)
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error)) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _is_ready(sock: socket.socket, event: int) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(0))
