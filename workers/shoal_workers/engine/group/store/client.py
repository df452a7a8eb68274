"""A client of the rendezvous store: the store of one generation behind torch's Store interface, and its connection.

gloo and NCCL exchange their addresses through it while they connect. torch calls it from C++ through a trampoline, with
the interpreter's lock held, on whichever thread makes a group; an exception raised here reaches the caller of torch
unchanged. The trampoline looks methods up on the Python object, so this object must live as long as any group that was
made with it.

A connection has one request at a time, in waits that another thread can end: `wake` makes a waiting request call its
`check` at once. A request that `check` ends leaves the connection intact: the next request has another number, and a
late answer is dropped. So a connection outlives the generation that made it. Called by `Rendezvous`.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from shoal_workers.engine.generation_ends import Fenced
from shoal_workers.engine.group.store.messages import (
    Operation,
    Outcome,
    Space,
    StoreAnswer,
    StoreRequest,
    split,
    take_frame,
)
from shoal_workers.snapshot_store.transfer.wire import Wire, open_socket
from shoal_workers.sockets import set_up_connection

_SHOWN = 4
"""Keys in a message."""


class GenerationStore(Store):
    """Keys of one generation at one server.

    Every call raises what `check` raises, and DistStoreError if the store is lost, the timeout passes, or a newer
    generation uses it already.

    Args:
        check: raises Fenced once the generation is over; called at every wake-up of a wait.
    """

    def __init__(
        self, connection: StoreConnection, space: Space, *, check: Callable[[], None], timeout: timedelta
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._connection = connection
        self._space = space
        self._check = check
        self._is_closed = False
        self._clones: list[GenerationStore] = []
        """torch calls a clone through its Python object, so that must live, too."""

    def close(self) -> None:
        """Called from any thread: from now on every call raises DistStoreError, also calls of clones. The connection is
        not closed, but those of clones are."""
        self._is_closed = True
        for clone in self._clones:
            clone.close()
            clone._connection.close()

    def wake(self) -> None:
        """Called from any thread: makes a wait, also that of a clone, call `check` now."""
        self._connection.wake()
        for clone in self._clones:
            clone.wake()

    @property
    def _timeout(self) -> timedelta:
        """The timeout as torch keeps it, and as it sets it through a PrefixStore."""
        return self.timeout  # type: ignore[attr-defined, no-any-return]  # torch's stub lacks it

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Operation.SET, key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(Operation.SET, *(field for pair in zip(keys, values, strict=True) for field in pair))

    def get(self, key: str) -> bytes:
        """Waits until the key exists."""
        return self._ask(Operation.GET, key)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits until all keys exist."""
        return list(self._ask(Operation.GET, *keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(Operation.WAIT, *keys, timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(Operation.CHECK, *keys) == (b"1",)

    def add(self, key: str, value: int) -> int:
        return int(self._ask(Operation.ADD, key, str(value))[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(Operation.APPEND, key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(Operation.COMPARE_SET, key, expected_value, desired_value)[0]

    def delete_key(self, key: str) -> bool:
        return self._ask(Operation.DELETE, key) == (b"1",)

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._ask(Operation.KEYS)]

    def num_keys(self) -> int:
        return len(self.list_keys())

    def gather(self, name: str, rank: int, num_ranks: int, value: str, timeout: timedelta) -> list[str]:
        """Waits until all ranks have given a value under this name, with `gather` or `arrive`: all values, by rank."""
        (joined,) = self._ask(Operation.GATHER, name, str(rank), str(num_ranks), value, timeout=timeout)
        return [text.decode() for text in split(joined)]

    def arrive(self, name: str, rank: int, num_ranks: int, value: str, timeout: timedelta) -> None:
        """Waits as `gather` does, but the values stay at the store."""
        self._ask(Operation.ARRIVE, name, str(rank), str(num_ranks), value, timeout=timeout)

    def absent(self, name: str, num_ranks: int) -> list[int]:
        """The ranks that have not given a value under this name yet."""
        return [int(rank) for rank in self._ask(Operation.ABSENT, name, str(num_ranks))]

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> GenerationStore:
        """Returns a store of the same keys with a connection of its own: its calls do not wait for those of this
        store."""
        host, port = self._connection.address
        if self._is_closed:
            raise DistStoreError(f"generation {self._space.generation} has left the rendezvous store")
        try:
            connection = self._connection.another(self._check)
        except OSError as error:
            raise DistStoreError(f"the rendezvous store at {host}:{port} cannot be reached again: {error}") from None
        self._clones.append(GenerationStore(connection, self._space, check=self._check, timeout=self._timeout))
        return self._clones[-1]

    # The names by which torch's trampoline looks up two of them.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _ask(self, operation: Operation, *operands: str | bytes, timeout: timedelta | None = None) -> tuple[bytes, ...]:
        timeout_s = (self._timeout if timeout is None else timeout).total_seconds()
        host, port = self._connection.address
        if self._is_closed:
            raise DistStoreError(f"generation {self._space.generation} has left the rendezvous store")
        try:
            answer = self._connection.request(
                operation,
                self._space,
                tuple(operand.encode() if isinstance(operand, str) else operand for operand in operands),
                check=self._check,
                deadline_mono=time.monotonic() + timeout_s,
            )
        except TimeoutError:
            names = operands if operation in (Operation.GET, Operation.WAIT) else operands[:1]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            what = f"{operation} {', '.join(map(str, names[:_SHOWN]))}{more}".rstrip()
            # "wait timeout" is how torch's own stores word it, and how callers know it
            message = (
                f"the rendezvous store at {host}:{port} did not answer {what} within {timeout_s:g} s (wait timeout)"
            )
            raise DistStoreError(message) from None
        except OSError as error:
            self._check()
            raise DistStoreError(f"the rendezvous store at {host}:{port} was lost: {error}") from None
        match answer.outcome:
            case Outcome.DONE:
                return answer.values
            case Outcome.STALE:
                newest = answer.values[0].decode()
                raise Fenced(f"generation {self._space.generation} is over: the store is used by generation {newest}")
            case Outcome.REFUSED:
                raise DistStoreError(f"the rendezvous store refused {operation}: {answer.values[0].decode()}")


Address = tuple[str, int]
_CHECK_S = 1.0
"""Pause between two calls of `check` if the wait is not woken."""
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
        self._socket = open_socket(address, check, patience_s)
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
                # An answer to a request that was left comes late, has another number, and is dropped.
                if answer is not None and answer.number == self._number:
                    return answer
                if answer is None:
                    self._receive(check, deadline_mono)

    def wake(self) -> None:
        """Called from any thread: makes the waiting request, or the next one, call its `check` now."""
        try:
            self._wake.send(b"x")
        except OSError:  # enough wake-ups are waiting already, or it is closed
            pass

    def another(self, check: Callable[[], None]) -> StoreConnection:
        """Returns another connection to the same store, for requests that do not wait for those of this one. OSError:
        it does not answer."""
        return StoreConnection(self.address, self._key, check=check, patience_s=self._patience_s)

    @property
    def is_idle(self) -> bool:
        """True if no request is under way, and the store has not closed the connection."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            return not self._received and not _is_ready(self._socket, select.POLLIN)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Closes the connection; a request under way ends with ConnectionError."""
        self._break()
        with self._busy:
            for handle in (self._socket, self._wake, self._woken):
                handle.close()

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


def _is_ready(sock: socket.socket, event: int) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(0))
