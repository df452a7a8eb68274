"""One part of a snapshot as a reader sees it: a file of this node, or a process of another that serves its own.

Both are read by position, into memory that the caller names, in the caller's order; both say at the end whether the
part was written over meanwhile. Nothing is mapped: reading a file costs no page faults, and cannot raise SIGBUS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from shoal_workers.checkpoint.index import ShardIndex
from shoal_workers.memory.directory import OpenPart
from shoal_workers.memory.requests import Answer, Part, Request, Verb
from shoal_workers.memory.wire import CHUNK_BYTES, PeerRefused, Wire


class ReadablePart(Protocol):
    """Errors are OSErrors; the message says why in words."""

    is_local: bool
    index: ShardIndex

    def ask(self, ranges: Sequence[tuple[int, int]]) -> None:
        """The ranges (offset in the payload, bytes) that `next_into` will then be called for, in this order."""

    def next_into(self, view: memoryview) -> None: ...

    def is_unchanged(self) -> bool: ...


class LocalPart:
    is_local = True

    def __init__(self, part: OpenPart, check: Callable[[], None]) -> None:
        self._part = part
        self._check = check
        self._ranges: Iterator[tuple[int, int]] = iter(())
        header = part.header
        index = os.pread(part.fd, header.index_bytes, header.index_offset)
        extra = os.pread(part.fd, header.extra_bytes, header.extra_offset)
        if not part.is_unchanged():
            raise PeerRefused("it is being written over")
        self.index = _index(
            index, extra, rank=header.rank, world=header.world_size, generation=header.generation, step=header.step
        )

    def ask(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges = iter(ranges)

    def next_into(self, view: memoryview) -> None:
        offset, _ = next(self._ranges)
        position, done = self._part.header.payload_offset + offset, 0
        while done < len(view):
            self._check()
            count = os.preadv(self._part.fd, [view[done : done + CHUNK_BYTES]], position + done)
            if count == 0:
                raise PeerRefused("its file is shorter than its header says")
            done += count

    def is_unchanged(self) -> bool:
        return self._part.is_unchanged()


class RemotePart:
    """Over a connection that its caller owns, and that other parts of the same process may use after it."""

    is_local = False

    def __init__(self, wire: Wire, generation: int, rank: int, step: int) -> None:
        self._wire = wire
        asked = Request(verb=Verb.FIND, part=Part(generation=generation, rank=rank, step=step))
        found = _ask(wire, asked).part
        if found is None:
            raise PeerRefused("its answer names no part")
        self._found = found
        self.index = _index(
            wire.receive(found.index_bytes),
            wire.receive(found.extra_bytes),
            rank=found.rank,
            world=found.world_size,
            generation=found.generation,
            step=found.step,
        )

    def ask(self, ranges: Sequence[tuple[int, int]]) -> None:
        _ask(self._wire, Request(verb=Verb.READ, part=self._found, ranges=tuple(ranges)))

    def next_into(self, view: memoryview) -> None:
        self._wire.receive_into(view)

    def is_unchanged(self) -> bool:
        self._wire.tell(Request(verb=Verb.STILL, part=self._found))
        return self._wire.hear(Answer).ok


def _ask(wire: Wire, request: Request) -> Answer:
    wire.tell(request)
    answer = wire.hear(Answer)
    if not answer.ok:
        raise PeerRefused(answer.why)
    return answer


def _index(index: bytes, extra: bytes, *, rank: int, world: int, generation: int, step: int) -> ShardIndex:
    """What the slot's header says goes before what the index was written with."""
    try:
        known = ShardIndex.from_json(index)
        values = {"rank": rank, "world_size": world, "generation": generation, "step": step, "extra": json.loads(extra)}
    except ValueError as error:
        raise PeerRefused(f"its index cannot be read ({error})") from None
    return known.model_copy(update=values)
