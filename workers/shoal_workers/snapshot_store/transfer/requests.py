"""Requests between the snapshot stores of one attempt. Each request and each answer is one frame.

    FIND       part           -> Answer(part), then index JSON and extra JSON, raw
    READ       part, ranges   -> Answer, then the bytes of the ranges one after the other, raw
    UNCHANGED  part           -> Answer: ok if the part was not overwritten since; sent after reading
    PUT        part           -> Answer: there is room; then the client sends index, extra and payload, raw
                              -> Answer: the copy is complete

A connection may carry any number of requests. Used by both sides: `call` by clients, the types also by the server.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from shoal_workers.contract.base import Frozen
from shoal_workers.snapshot_store.slots.slot_files import PartHeader
from shoal_workers.snapshot_store.transfer.wire import PeerRefused, Wire

Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class Verb(StrEnum):
    FIND = "find"
    READ = "read"
    UNCHANGED = "unchanged"
    PUT = "put"


class Part(Frozen):
    """A part as it is sent over the wire."""

    generation: Count
    rank: Count
    world_size: Count = 0
    step: Count
    num_bytes: Count = 0
    index_bytes: Count = 0
    extra_bytes: Count = 0
    sequence: Count = 0
    """Sequence word of the slot that holds it, when its header was read."""

    @classmethod
    def from_header(cls, header: PartHeader) -> Part:
        return cls(
            generation=header.generation,
            rank=header.rank,
            world_size=header.world_size,
            step=header.step,
            num_bytes=header.num_bytes,
            index_bytes=header.index_bytes,
            extra_bytes=header.extra_bytes,
            sequence=header.sequence,
        )


class Request(Frozen):
    verb: Verb
    part: Part
    ranges: tuple[tuple[Count, Count], ...] = ()
    """READ: (offset in the payload, bytes) each."""
    keep_step: Count | None = None
    """PUT: the step of an earlier copy of this rank that must not be overwritten."""


class Answer(Frozen):
    ok: bool = True
    why: str = ""
    """The reason, if not ok."""
    part: Part | None = None
    cpu_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """PUT, in the second answer: CPU seconds that receiving took."""


def call(wire: Wire, request: Request) -> Answer:
    """Send the request and return the answer.

    PeerRefused if it is not ok, another OSError if the connection fails.
    """
    wire.send_message(request)
    return receive_ok(wire)


def receive_ok(wire: Wire) -> Answer:
    """Return the next answer. PeerRefused if it is not ok."""
    answer = wire.receive_message(Answer)
    if not answer.ok:
        raise PeerRefused(answer.why)
    return answer
