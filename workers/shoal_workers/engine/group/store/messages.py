"""The store's messages: what they are, and their bytes. Nothing is unpickled.

    frame      4 bytes of length, then fields; a field is 4 bytes of length and its bytes
    request    number, operation, generation, name of the space, operands...
    answer     number, outcome, values...

A connection has one request at a time. A client that gives up a wait sends its next request under the next number, and
drops an answer with another number: it is late.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MAX_FRAME_BYTES = 16 << 20
_LENGTH = struct.Struct("=I")


class Operation(StrEnum):
    SET = "set"
    """key, value, key, value..."""
    GET = "get"
    """keys; answered once all of them exist."""
    WAIT = "wait"
    """keys; answered once all of them exist, without their values."""
    CHECK = "check"
    """keys; whether all of them exist."""
    ADD = "add"
    """key, number."""
    APPEND = "append"
    """key, value."""
    COMPARE_SET = "compare_set"
    """key, expected value, desired value."""
    DELETE = "delete"
    """key."""
    KEYS = "keys"
    GATHER = "gather"
    """name, rank, number of ranks, value; answered once all ranks have given theirs, with all values in one field."""
    ARRIVE = "arrive"
    """A gather that is answered without values."""
    ABSENT = "absent"
    """name, number of ranks; the ranks that have given none."""


class Outcome(StrEnum):
    DONE = "done"
    STALE = "stale"
    """A newer generation uses this store already."""
    REFUSED = "refused"
    """The request is not valid; the only value says why."""


@dataclass(frozen=True, slots=True)
class Space:
    """The scope of a generation's keys. Scopes are ordered by generation: the first request of a newer one removes all
    older."""

    generation: int
    name: str


@dataclass(frozen=True, slots=True)
class StoreRequest:
    number: int
    operation: Operation
    space: Space
    operands: tuple[bytes, ...]

    def pack(self) -> bytes:
        space = self.space
        head = (str(self.number), self.operation, str(space.generation), space.name)
        return pack((*(field.encode() for field in head), *self.operands))

    @staticmethod
    def parse(fields: list[bytes]) -> StoreRequest:
        """Raises ValueError if the fields are no request."""
        if len(fields) < 4:
            raise ValueError(f"a request has at least 4 fields, and this one has {len(fields)}")
        number, operation, generation, name, *operands = fields
        space = Space(int(generation), name.decode())
        return StoreRequest(int(number), Operation(operation.decode()), space, tuple(operands))


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    number: int
    outcome: Outcome
    values: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        return pack((str(self.number).encode(), self.outcome.encode(), *self.values))

    @staticmethod
    def parse(fields: list[bytes]) -> StoreAnswer:
        """Raises ValueError if the fields are no answer."""
        if len(fields) < 2:
            raise ValueError(f"an answer has at least 2 fields, and this one has {len(fields)}")
        return StoreAnswer(int(fields[0]), Outcome(fields[1].decode()), tuple(fields[2:]))


def pack(fields: Iterable[bytes]) -> bytes:
    body = join(fields)
    return _LENGTH.pack(len(body)) + body


def join(fields: Iterable[bytes]) -> bytes:
    """One field that holds several; `split` takes it apart."""
    return b"".join(_LENGTH.pack(len(field)) + field for field in fields)


def split(joined: bytes) -> list[bytes]:
    """Returns the fields that `join` has joined. ValueError: `joined` does not consist of whole fields."""
    fields, at, end = [], 0, len(joined)
    while at < end:
        if end - at < _LENGTH.size:
            raise ValueError("the last field of a message is cut off")
        (count,) = _LENGTH.unpack_from(joined, at)
        at += _LENGTH.size
        if at + count > end:
            raise ValueError("a field is longer than its message")
        fields.append(joined[at : at + count])
        at += count
    return fields


def take_frame(buffer: bytearray) -> list[bytes] | None:
    """The fields of the first frame, which is removed from the buffer; None if it is not complete yet.

    ValueError: it is too long, or its fields do not fill it.
    """
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes is longer than any message of a rendezvous store")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    fields = split(bytes(memoryview(buffer)[_LENGTH.size : end]))
    del buffer[:end]
    return fields
