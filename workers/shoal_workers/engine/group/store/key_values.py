"""The keys and values of a store, by generation: a pure state machine without sockets or threads.

A request is answered at once, or waits. `apply` returns the answer or None; `ready` returns the waits that have ended.
A waiting request is looked at again only when the thing that it lacks is there: with a look at every wait after every
request, N ranks that wait for each other would cost N^2 looks. In a `Gathering` each rank gives a value under a name,
and once all have, each may have all of them. Called by `StoreServer`, on its thread.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shoal_workers.engine.group.store.messages import Operation, Outcome, Space, StoreAnswer, StoreRequest, join

Client = TypeVar("Client", bound=Hashable)


@dataclass(slots=True)
class _Contents:
    """The contents of one generation."""

    keys: dict[bytes, bytes] = field(default_factory=dict)
    gatherings: dict[bytes, Gathering] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Lack:
    """What a waiting request waits for next."""

    space: Space
    name: bytes
    is_gathering: bool = False


@dataclass(slots=True)
class _Wait:
    request: StoreRequest
    lack: _Lack
    num_found: int = 0
    """How many of its keys were there when it was looked at; all are looked at once more before it is answered."""


class KeyValues(Generic[Client]):
    """`Client` identifies a connection; it waits for one request at most."""

    def __init__(self) -> None:
        self._contents: dict[Space, _Contents] = {}
        self._newest = 0
        self._waits: dict[Client, _Wait] = {}
        self._lacking: dict[_Lack, dict[Client, _Wait]] = {}
        self._ended: list[tuple[Client, StoreAnswer]] = []

    @property
    def num_keys(self) -> int:
        """The keys of all generations, and the values of gatherings. Any thread."""
        return sum(
            len(content.keys) + sum(len(gathering.values) for gathering in tuple(content.gatherings.values()))
            for content in tuple(self._contents.values())
        )

    def apply(self, client: Client, request: StoreRequest) -> StoreAnswer | None:
        """The answer, or None if the client has to wait for it. Replaces a wait that the client has given up."""
        self.forget(client)
        if request.space.generation < self._newest:
            return self._stale(request)
        if request.space.generation > self._newest:
            # The first request of a newer generation ends the older ones.
            self._newest = request.space.generation
            self._contents.clear()
            self._ended += [(waiting, self._stale(wait.request)) for waiting, wait in self._waits.items()]
            self._waits.clear()
            self._lacking.clear()
        contents = self._contents.setdefault(request.space, _Contents())
        try:
            if request.operation in (Operation.GET, Operation.WAIT):
                return self._when_there(client, _Wait(request, _Lack(request.space, b"")), contents)
            if request.operation in (Operation.GATHER, Operation.ARRIVE):
                return self._when_complete(client, request, contents)
            values = self._values(request, contents)
        except ValueError as error:
            return StoreAnswer(request.number, Outcome.REFUSED, (str(error).encode(),))
        return StoreAnswer(request.number, Outcome.DONE, values)

    def ready(self) -> list[tuple[Client, StoreAnswer]]:
        """The waits that have ended since the last call, with their answers."""
        ended, self._ended = self._ended, []
        return ended

    def forget(self, client: Client) -> None:
        """Drops the wait of a client that is gone, or that no longer waits."""
        wait = self._waits.pop(client, None)
        if wait is not None:
            lacking = self._lacking[wait.lack]
            del lacking[client]
            if not lacking:
                del self._lacking[wait.lack]

    def _stale(self, request: StoreRequest) -> StoreAnswer:
        return StoreAnswer(request.number, Outcome.STALE, (str(self._newest).encode(),))

    def _when_there(self, client: Client, wait: _Wait, contents: _Contents) -> StoreAnswer | None:
        """The answer to GET or WAIT if all its keys are there."""
        request, keys = wait.request, contents.keys
        for first in (wait.num_found, 0):  # from 0 on once more: keys that were found may have been deleted
            for index in range(first, len(request.operands)):
                if request.operands[index] not in keys:
                    wait.num_found = index
                    self._wait(client, wait, _Lack(request.space, request.operands[index]))
                    return None
        values = tuple(keys[key] for key in request.operands) if request.operation is Operation.GET else ()
        return StoreAnswer(request.number, Outcome.DONE, values)

    def _when_complete(self, client: Client, request: StoreRequest, contents: _Contents) -> StoreAnswer | None:
        """The answer to GATHER or ARRIVE if this is the last rank."""
        if len(request.operands) != 4:
            raise _misfit(request)
        name, rank, num_ranks, value = request.operands
        gathering = contents.gatherings.get(name) or Gathering(int(num_ranks))
        is_last = gathering.give(int(rank), int(num_ranks), value)
        contents.gatherings[name] = gathering
        lack = _Lack(request.space, name, is_gathering=True)
        if is_last:
            for waiting, wait in self._lacking.pop(lack, {}).items():
                del self._waits[waiting]
                self._ended.append((waiting, _gathered(wait.request, gathering)))
        if gathering.is_complete:
            return _gathered(request, gathering)
        self._wait(client, _Wait(request, lack), lack)
        return None

    def _wait(self, client: Client, wait: _Wait, lack: _Lack) -> None:
        wait.lack = lack
        self._waits[client] = wait
        self._lacking.setdefault(lack, {})[client] = wait

    def _write(self, space: Space, contents: _Contents, key: bytes, value: bytes) -> None:
        is_new = key not in contents.keys
        contents.keys[key] = value
        for client, wait in self._lacking.pop(_Lack(space, key), {}).items() if is_new else ():
            del self._waits[client]
            answer = self._when_there(client, wait, contents)
            if answer is not None:
                self._ended.append((client, answer))

    def _values(self, request: StoreRequest, contents: _Contents) -> tuple[bytes, ...]:
        """The values that answer a request that does not wait. ValueError: the operands do not fit the operation."""
        keys, space = contents.keys, request.space
        match request.operation, request.operands:
            case Operation.SET, operands if len(operands) % 2 == 0:
                for key, value in zip(operands[::2], operands[1::2], strict=True):
                    self._write(space, contents, key, value)
                return ()
            case Operation.CHECK, operands:
                return (b"1" if all(key in keys for key in operands) else b"0",)
            case Operation.ADD, (key, number):
                self._write(space, contents, key, str(int(keys.get(key, b"0")) + int(number)).encode())
                return (keys[key],)
            case Operation.APPEND, (key, value):
                self._write(space, contents, key, keys.get(key, b"") + value)
                return ()
            case Operation.COMPARE_SET, (key, expected, desired):
                return (self._compare_set(space, contents, key, expected, desired),)
            case Operation.DELETE, (key,):
                return (b"0" if keys.pop(key, None) is None else b"1",)
            case Operation.KEYS, ():
                return tuple(sorted(keys))
            case Operation.ABSENT, (name, num_ranks):
                gathering = contents.gatherings.get(name) or Gathering(int(num_ranks))
                return tuple(str(rank).encode() for rank in gathering.absent)
        raise _misfit(request)

    def _compare_set(self, space: Space, contents: _Contents, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Compares and sets as torch's stores do: a missing key equals an empty expectation, and its value is the
        expectation."""
        current = contents.keys.get(key)
        if current == expected or (current is None and not expected):
            self._write(space, contents, key, desired)
            return desired
        return expected if current is None else current


def _gathered(request: StoreRequest, gathering: Gathering) -> StoreAnswer:
    values = (gathering.joined,) if request.operation is Operation.GATHER else ()
    return StoreAnswer(request.number, Outcome.DONE, values)


def _misfit(request: StoreRequest) -> ValueError:
    return ValueError(f"the operation {request.operation} does not have {len(request.operands)} operands")


class Gathering:
    """One exchange among `num_ranks` ranks, numbered from 0."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"{num_ranks} ranks exchange nothing")
        self._num_ranks = num_ranks
        self.values: dict[int, bytes] = {}
        """By rank."""
        self.joined = b""
        """All values by rank, see `split`; empty until it is complete."""

    def give(self, rank: int, num_ranks: int, value: bytes) -> bool:
        """Whether this completes it. A value that replaces an earlier one is ignored once all ranks have given theirs.

        ValueError: the rank does not take part, or another rank has named another number of ranks.
        """
        if num_ranks != self._num_ranks:
            raise ValueError(f"one rank says {num_ranks} ranks, and another one {self._num_ranks}")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"there is no rank {rank} among {num_ranks}")
        if self.is_complete:
            return False
        self.values[rank] = value
        is_last = len(self.values) == num_ranks
        if is_last:
            self.joined = join(self.values[index] for index in range(num_ranks))
        return is_last

    @property
    def is_complete(self) -> bool:
        return len(self.values) == self._num_ranks

    @property
    def absent(self) -> list[int]:
        """Ranks that have given none, ascending."""
        return [rank for rank in range(self._num_ranks) if rank not in self.values]
