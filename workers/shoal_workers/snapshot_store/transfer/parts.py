"""One part of a snapshot as a reader sees it: a file on this node, or a process on another node that serves its parts.

    LocalPart    if the file was mapped ahead (slots/peer_maps.py), all boxes are copied from the map. Otherwise whole
                 rows of saved slices are read from the file directly into the target tensor; for other boxes the file
                 is mapped read-only, which costs a page fault per 64 KiB
    RemotePart   whole rows over TCP, in the order of the payload; a box that is not whole rows passes through scratch
                 memory

Both report at the end whether the part was overwritten meanwhile. Slots are never truncated, so access to a map of one
cannot raise SIGBUS. Called by `loading`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal_workers.checkpoint.index import IndexItem, ShardIndex
from shoal_workers.checkpoint.loading.load_plan import Fill, ItemRead
from shoal_workers.snapshot_store.slots.registry import OpenPart
from shoal_workers.snapshot_store.transfer.requests import Answer, Part, Request, Verb, call
from shoal_workers.snapshot_store.transfer.wire import PeerRefused, Wire

_WINDOW_BYTES = 32 << 20


class ReadablePart(Protocol):
    """Errors are OSErrors; their message is the reason in words."""

    is_local: bool
    index: ShardIndex

    def fill(self, reads: Iterable[ItemRead]) -> int:
        """Copies what these reads need of this part into their targets; returns the bytes read."""

    def is_unchanged(self) -> bool: ...


class LocalPart:
    is_local = True

    def __init__(
        self, part: OpenPart, check: Callable[[], None], mapped: Callable[[int, int], mmap.mmap | None]
    ) -> None:
        self._part = part
        self._check = check
        self._mapped = mapped
        header = part.header
        index = os.pread(part.fd, header.index_bytes, header.index_offset)
        extra = os.pread(part.fd, header.extra_bytes, header.extra_offset)
        if not part.is_unchanged():
            raise PeerRefused("it is being overwritten")
        self.index = _index(
            index, extra, rank=header.rank, world=header.world_size, generation=header.generation, step=header.step
        )

    def fill(self, reads: Iterable[ItemRead]) -> int:
        start, num_bytes = self._part.header.payload_offset, 0
        end = start + self._part.header.num_bytes
        memory = self._mapped(self._part.fd, end)
        window = _Window(self._part.fd, end, memory)
        for read in reads:
            self._check()
            for fill in read.fills:
                num_bytes += fill.target.nbytes
                piece = _piece(read, fill)
                if _is_direct(piece):
                    if memory is None:
                        self._read_into(_memory_of(fill.target), start + piece.offset)
                    else:
                        source = window.at(start + piece.offset, piece.num_bytes)
                        ctypes.memmove(fill.target.data_ptr(), source.data_ptr(), piece.num_bytes)
                    continue
                item = read.item
                saved = window.at(start + item.file_offset, item.nbytes).view(read.dtype).view(item.sizes)
                fill.target.copy_(_narrowed(saved, fill.source_offsets, fill.lengths))
        return num_bytes

    def _read_into(self, memory: memoryview, offset: int) -> None:
        while memory:
            count = os.preadv(self._part.fd, [memory], offset)
            if not count:
                raise PeerRefused("its file is shorter than its header says")
            memory, offset = memory[count:], offset + count

    def is_unchanged(self) -> bool:
        return self._part.is_unchanged()


class _Window:
    """Maps a file window by window, in ascending order, so that only one window counts as this process's memory."""

    def __init__(self, fd: int, file_bytes: int, memory: mmap.mmap | None) -> None:
        """`memory`: a map of the whole file that exists already."""
        self._fd = fd
        self._file_bytes = file_bytes
        self._start = 0
        self._memory = torch.empty(0, dtype=torch.uint8) if memory is None else _readable(memory)

    def at(self, offset: int, count: int) -> torch.Tensor:
        """A view of the file; it stays mapped as long as the view exists."""
        if not count:
            return self._memory[:0]
        if not self._start <= offset <= offset + count <= self._start + len(self._memory):
            self._start = offset - offset % mmap.ALLOCATIONGRANULARITY
            length = min(max(offset + count - self._start, _WINDOW_BYTES), self._file_bytes - self._start)
            try:
                file = mmap.mmap(self._fd, length, prot=mmap.PROT_READ, offset=self._start)
            except ValueError:
                raise PeerRefused("its file is shorter than its header says") from None
            self._memory = _readable(file)
        return self._memory[offset - self._start : offset - self._start + count]


def _readable(memory: mmap.mmap) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only
        return torch.frombuffer(memory, dtype=torch.uint8)


class RemotePart:
    """Over a connection that its caller owns, and that is used for the process's other parts, too.

    `connected`: returns it; a new one if it was closed meanwhile."""

    is_local = False

    def __init__(self, connected: Callable[[], Wire], generation: int, rank: int, step: int) -> None:
        self._connected = connected
        wire = connected()
        found = call(wire, Request(verb=Verb.FIND, part=Part(generation=generation, rank=rank, step=step))).part
        if found is None:
            raise PeerRefused("its answer contains no part")
        self._found = found
        self.index = _index(
            wire.receive(found.index_bytes),
            wire.receive(found.extra_bytes),
            rank=found.rank,
            world=found.world_size,
            generation=found.generation,
            step=found.step,
        )

    def fill(self, reads: Iterable[ItemRead]) -> int:
        pieces = [piece for read in reads for fill in read.fills if (piece := _piece(read, fill)).num_bytes]
        if not pieces:
            return 0
        scratch = torch.empty(max((p.num_bytes for p in pieces if not _is_direct(p)), default=0), dtype=torch.uint8)
        ranges = tuple((piece.offset, piece.num_bytes) for piece in pieces)
        wire = self._connected()
        call(wire, Request(verb=Verb.READ, part=self._found, ranges=ranges))
        for piece in pieces:
            target = piece.fill.target
            if _is_direct(piece):
                wire.receive_into(_memory_of(target))
                continue
            memory = scratch[: piece.num_bytes]
            wire.receive_into(memory.numpy().data)
            target.copy_(_box(memory.view(piece.read.dtype), piece.read.item, piece.fill))
        return sum(piece.num_bytes for piece in pieces)

    def is_unchanged(self) -> bool:
        wire = self._connected()
        wire.send_message(Request(verb=Verb.UNCHANGED, part=self._found))
        return wire.receive_message(Answer).ok


@dataclass(frozen=True, slots=True)
class _Piece:
    """The whole rows of a saved slice that one fill needs: one range of the payload."""

    offset: int
    num_bytes: int
    read: ItemRead
    fill: Fill


def _piece(read: ItemRead, fill: Fill) -> _Piece:
    item = read.item
    if not item.sizes or not item.nbytes:
        return _Piece(item.file_offset, item.nbytes, read, fill)
    row_bytes = item.nbytes // item.sizes[0]
    return _Piece(item.file_offset + fill.source_offsets[0] * row_bytes, fill.lengths[0] * row_bytes, read, fill)


def _is_direct(piece: _Piece) -> bool:
    """The target takes whole rows, in one contiguous piece of CPU memory."""
    target = piece.fill.target
    whole_rows = piece.fill.lengths[1:] == piece.read.item.sizes[1:]
    return whole_rows and target.device.type == "cpu" and target.is_contiguous()


def _memory_of(target: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes."""
    return target.reshape(-1).view(torch.uint8).numpy().data


def _box(rows: torch.Tensor, item: IndexItem, fill: Fill) -> torch.Tensor:
    if not item.sizes:
        return rows.view(())
    shaped = rows.view(fill.lengths[0], *item.sizes[1:])
    return _narrowed(shaped, (0, *fill.source_offsets[1:]), fill.lengths)


def _index(index: bytes, extra: bytes, *, rank: int, world: int, generation: int, step: int) -> ShardIndex:
    """The values of the slot's header replace those in the index, which was written once for many snapshots."""
    try:
        known = ShardIndex.from_json(index)
        values = {"rank": rank, "world_size": world, "generation": generation, "step": step, "extra": json.loads(extra)}
    except ValueError as error:
        raise PeerRefused(f"its index cannot be read ({error})") from None
    return known.model_copy(update=values)


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The box of a tensor that begins at `offsets`."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=False)):
        if length < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, length)
    return tensor
