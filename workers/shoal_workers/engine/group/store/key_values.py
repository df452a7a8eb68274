"""The keys and values of a store, by generation: a pure state machine without sockets or threads.

A request is answered at once, or waits for keys. `apply` returns the answer or None; after a change, `ready` returns
the waits that it has ended. Called by `StoreServer`, on its thread.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from shoal_workers.engine.group.store.messages import Operation, Outcome, Space, StoreAnswer, StoreRequest

Client = TypeVar("Client", bound=Hashable)


class KeyValues(Generic[Client]):
    """`Client` identifies a connection; it waits for one request at most."""

    def __init__(self) -> None:
        self._spaces: dict[Space, dict[bytes, bytes]] = {}
        self._newest = 0
        self._waits: dict[Client, StoreRequest] = {}

    @property
    def num_keys(self) -> int:
        """Of all generations. Any thread."""
        return sum(map(len, tuple(self._spaces.values())))

    def apply(self, client: Client, request: StoreRequest) -> StoreAnswer | None:
        """The answer, or None if the client has to wait for it. Replaces a wait that the client has given up."""
        self._waits.pop(client, None)
        if request.space.generation < self._newest:
            return StoreAnswer(request.number, Outcome.STALE, (str(self._newest).encode(),))
        if request.space.generation > self._newest:
            self._newest = request.space.generation
            self._spaces.clear()
        answer = self._answer(request)
        if answer is None:
            self._waits[client] = request
        return answer

    def ready(self) -> list[tuple[Client, StoreAnswer]]:
        """The waits that have ended since the last call, with their answers."""
        found = []
        for client, request in self._waits.items():
            if request.space.generation < self._newest:
                answer: StoreAnswer | None = StoreAnswer(request.number, Outcome.STALE, (str(self._newest).encode(),))
            else:
                answer = self._answer(request)
            if answer is not None:
                found.append((client, answer))
        for client, _ in found:
            del self._waits[client]
        return found

    def forget(self, client: Client) -> None:
        """The client is gone."""
        self._waits.pop(client, None)

    def _answer(self, request: StoreRequest) -> StoreAnswer | None:
        try:
            values = self._values(request.operation, self._spaces.setdefault(request.space, {}), request.operands)
        except ValueError as error:
            return StoreAnswer(request.number, Outcome.REFUSED, (str(error).encode(),))
        return None if values is None else StoreAnswer(request.number, Outcome.DONE, values)

    @staticmethod
    def _values(
        operation: Operation, keys: dict[bytes, bytes], operands: tuple[bytes, ...]
    ) -> tuple[bytes, ...] | None:
        """None: keys are missing. ValueError: the operands do not fit the operation."""
        match operation, operands:
            case Operation.SET, _ if len(operands) % 2 == 0:
                keys.update(zip(operands[::2], operands[1::2], strict=True))
                return ()
            case Operation.GET, _:
                return tuple(keys[key] for key in operands) if all(key in keys for key in operands) else None
            case Operation.WAIT, _:
                return () if all(key in keys for key in operands) else None
            case Operation.CHECK, _:
                return (b"1" if all(key in keys for key in operands) else b"0",)
            case Operation.ADD, (key, number):
                keys[key] = str(int(keys.get(key, b"0")) + int(number)).encode()
                return (keys[key],)
            case Operation.APPEND, (key, value):
                keys[key] = keys.get(key, b"") + value
                return ()
            case Operation.COMPARE_SET, (key, expected, desired):
                return (_compare_set(keys, key, expected, desired),)
            case Operation.DELETE, (key,):
                return (b"0" if keys.pop(key, None) is None else b"1",)
            case Operation.KEYS, ():
                return tuple(sorted(keys))
        raise ValueError(f"the operation {operation} does not have {len(operands)} operands")


def _compare_set(keys: dict[bytes, bytes], key: bytes, expected: bytes, desired: bytes) -> bytes:
    """As torch's stores do it: a missing key equals an empty expectation, and its value is the expectation."""
    current = keys.get(key)
    if current == expected or (current is None and not expected):
        keys[key] = desired
        return desired
    return expected if current is None else current
