"""What processes of one attempt ask each other for; each request is one frame, and so is its answer.

    LIST                  -> Answer(holdings)
    FIND  part            -> Answer(part), then index JSON and extra JSON, raw
    READ  part, ranges    -> Answer, then the bytes of the ranges one after the other, raw
    STILL part            -> Answer: nothing was written over it since; asked after reading
    PUT   part            -> Answer (there is room), then the client sends index, extra, payload, raw -> Answer (kept)

Pure data. A connection may carry any number of requests.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.snapshots import SnapshotPart

Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class Verb(StrEnum):
    LIST = "list"
    FIND = "find"
    READ = "read"
    STILL = "still"
    PUT = "put"


class Part(Frozen):
    """A part as it goes over the wire."""

    generation: Count
    rank: Count
    world_size: Count = 0
    step: Count
    num_bytes: Count = 0
    index_bytes: Count = 0
    extra_bytes: Count = 0
    sequence: Count = 0
    """Of the slot that holds it, when it was found."""


class Request(Frozen):
    verb: Verb
    part: Part | None = None
    """In all but LIST."""
    ranges: tuple[tuple[Count, Count], ...] = ()
    """READ: (offset in the payload, bytes) each."""


class Answer(Frozen):
    ok: bool = True
    why: str = ""
    """When not ok."""
    part: Part | None = None
    snapshot_parts: tuple[SnapshotPart, ...] = ()
    cpu_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """PUT, once it is kept: CPU seconds that taking it in has cost."""
