"""Fills a state of any layout from a whole snapshot in memory, part by part, as `checkpoint/load_plan` plans it. Hides
where a part lies: in a file on this node, or behind a process on another node.

Each rank reads on its own, without collectives, and opens part 0 and the parts of which it needs something. If this
node has a copy of a part, the part is read here, even if the supervisor named another node. A part that exists only as
a log is replayed by the process that the supervisor named. If it raises, some of the state's values may have been
replaced and others not.

    LocalPart    copies from a map of the file, if it was mapped ahead (`peer_maps`); otherwise it reads whole rows
                 of saved slices from the file
    RemotePart   reads whole rows over TCP, in the order of the payload

Rows are read straight into the target tensor; a box that is not whole rows passes through scratch memory. Both parts
report at the end whether the part was overwritten meanwhile. Slots are never truncated, so access to a map of one
cannot raise SIGBUS. Called by the snapshot store, on the training thread.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal_workers.checkpoint.errors import CheckpointError
from shoal_workers.checkpoint.index import ShardIndex, payload_name
from shoal_workers.checkpoint.load_plan import Fill, ItemRead, Shape, narrowed, plan_needed
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.snapshot_store.slots.registry import OpenPart, SlotRegistry
from shoal_workers.snapshot_store.slots.slot_files import PartHeader
from shoal_workers.snapshot_store.snapshot_errors import SnapshotLost
from shoal_workers.snapshot_store.transfer.wire import Answer, Part, PeerRefused, Request, Verb, Wire, call, connect

_PATIENCE_S = 5.0
_QUEUE_S = 20.0
"""A server accepts a connection only when it has a free thread: a thousand ranks may want part 0 at once."""

FindMap = Callable[[int, int], mmap.mmap | None]
"""Returns, for a descriptor and a number of bytes, a map of at least these bytes of the file, if this process has
one."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    extra: dict[str, Any]
    """The plain values that rank 0 of the snapshot's generation saved."""
    local_bytes: int
    """Read from this node's memory."""
    remote_bytes: int
    """Read over the network."""
    other_extras: tuple[dict[str, Any], ...] = ()
    """Plain values that the other ranks saved whose parts were opened."""
    absent: frozenset[str] = frozenset()
    """Optional tensors that the snapshot lacks: they were not filled."""
    unread: Mapping[str, Shape] = field(default_factory=dict)
    """See `LoadPlan`."""

    @property
    def num_bytes(self) -> int:
        return self.local_bytes + self.remote_bytes


def load(
    state: Mapping[str, torch.Tensor],
    source: SnapshotSource,
    *,
    registry: SlotRegistry,
    find_map: FindMap,
    node_id: str,
    key: str,
    check: Callable[[], None],
    optional: Mapping[str, str] | None = None,
) -> LoadResult:
    """SnapshotLost if a part cannot be read, or does not fit the state. An error that `check` raises passes through.

    `optional`: as for `plan_needed`."""
    assert len(source.parts) == source.world_size, source
    registry.scan()
    with ExitStack() as resources:
        resources.enter_context(_paused_collector())
        reader = _Reader(source, registry, find_map, node_id, key, check, resources)
        try:
            plan = plan_needed(state, source.world_size, reader.indexes, directory="in memory", optional=optional)
        except CheckpointError as error:
            raise reader.lost(0, str(error)) from None
        by_part: dict[str, list[ItemRead]] = defaultdict(list)
        for read in plan.reads:
            by_part[read.file].append(read)
        num_bytes = {True: 0, False: 0}
        for rank, part in sorted(reader.parts.items()):
            if payload_name(rank) in by_part:
                with reader.raises_snapshot_lost(rank):
                    num_bytes[part.is_local] += part.fill(by_part[payload_name(rank)])
                    if not part.is_unchanged():
                        raise PeerRefused("it was overwritten while it was read")
        return LoadResult(
            plan.extra,
            local_bytes=num_bytes[True],
            remote_bytes=num_bytes[False],
            other_extras=plan.other_extras,
            absent=plan.absent,
            unread=plan.unread,
        )


@contextmanager
def _paused_collector() -> Iterator[None]:
    """A plan has many objects and no garbage: a full collection in between would take longer than to make the plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Reader:
    """The parts of one source that were opened, and one connection at a time to a process that serves some of them.

    A connection occupies a thread of its server. If a rank held several, all of them could wait for each other's."""

    def __init__(
        self,
        source: SnapshotSource,
        registry: SlotRegistry,
        find_map: FindMap,
        node_id: str,
        key: str,
        check: Callable[[], None],
        resources: ExitStack,
    ) -> None:
        self._source = source
        self._registry = registry
        self._find_map = find_map
        self._node_id = node_id
        self._key = key
        self._check = check
        self._resources = resources
        self._wire: tuple[SnapshotServer, Wire] | None = None
        self.parts: dict[int, LocalPart | RemotePart] = {}
        """The opened parts, by rank."""
        resources.callback(self._hang_up)

    def indexes(self, ranks: Sequence[int]) -> list[ShardIndex]:
        """Open the parts of these ranks."""
        for rank in ranks:
            self.parts[rank] = self._open(rank)
        return [self.parts[rank].index for rank in ranks]

    def _open(self, rank: int) -> LocalPart | RemotePart:
        source, server = self._source, self._source.parts[rank]
        with self.raises_snapshot_lost(rank):
            self._check()
            local_part = self._open_local(rank)
            if local_part is None and server.node_id == self._node_id:
                # not as a file: the process that the supervisor named makes one, once for all ranks of this node
                self._open_remote(rank)
                local_part = self._open_local(rank, scans=True)
                if local_part is None:
                    raise PeerRefused("it no longer exists, or is not complete")
            part = (
                LocalPart(local_part, self._check, self._find_map)
                if local_part is not None
                else self._open_remote(rank)
            )
            if part.index.world_size != source.world_size:
                raise PeerRefused(f"its world size is {part.index.world_size}, not {source.world_size}")
            return part

    def _open_local(self, rank: int, *, scans: bool = False) -> OpenPart | None:
        opened = self._registry.open_part(self._source.generation, rank, self._source.step, scans=scans)
        return self._resources.enter_context(opened)

    def _open_remote(self, rank: int) -> RemotePart:
        source = self._source
        return RemotePart(lambda: self._connect(source.parts[rank]), source.generation, rank, source.step)

    @contextmanager
    def raises_snapshot_lost(self, rank: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.lost(rank, error.strerror or str(error)) from None

    def lost(self, rank: int, why: str) -> SnapshotLost:
        source = self._source
        return SnapshotLost(source.generation, source.step, rank, source.parts[rank].node_id, why)

    def _connect(self, server: SnapshotServer) -> Wire:
        if self._wire is None or self._wire[0] != server:
            self._hang_up()
            wire = connect(server, self._key, check=self._check, patience_s=_PATIENCE_S, queue_s=_QUEUE_S)
            self._wire = server, wire
        return self._wire[1]

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire[1].__exit__()
            self._wire = None


class _StoredPart:
    """A part of a snapshot, wherever it is. Errors are OSErrors; their message is the reason in words."""

    index: ShardIndex

    def fill(self, reads: Iterable[ItemRead]) -> int:
        """Copy what these reads need of this part into their targets; return the bytes read."""
        pieces = [piece for read in reads for piece in _pieces(read)]
        scratch_bytes = max((piece.num_bytes for piece in pieces if not piece.is_direct), default=0)
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
        self._request(pieces)
        for piece in pieces:
            rows = piece.target.reshape(-1).view(torch.uint8) if piece.is_direct else scratch[: piece.num_bytes]
            self._read(rows.numpy().data, piece.offset)
            if not piece.is_direct:
                piece.target.copy_(piece.box_of(rows))
        return sum(piece.num_bytes for piece in pieces)

    def _request(self, pieces: Sequence[_Piece]) -> None:
        """Announce what will be read, in this order."""

    def _read(self, memory: memoryview, offset: int) -> None:
        """Fill the memory from this offset of the payload on."""
        raise NotImplementedError


class LocalPart(_StoredPart):
    """A part in this node's memory."""

    is_local = True

    def __init__(self, part: OpenPart, check: Callable[[], None], find_map: FindMap) -> None:
        self._part = part
        self._check = check
        self._find_map = find_map
        description = part.read_description()
        if description is None:
            raise PeerRefused("it is being overwritten")
        self.index = _parse_index(*description, part.header)

    def fill(self, reads: Iterable[ItemRead]) -> int:
        header = self._part.header
        memory = self._find_map(self._part.fd, header.payload_offset + header.num_bytes)
        if memory is None:
            return super().fill(reads)
        payload, num_bytes = _readable(memory)[header.payload_offset :], 0
        for piece in (piece for read in reads for piece in _pieces(read)):
            self._check()
            rows = payload[piece.offset : piece.offset + piece.num_bytes]
            if piece.is_direct:  # torch's copy loop writes through the cache, which takes longer
                ctypes.memmove(piece.target.data_ptr(), rows.data_ptr(), piece.num_bytes)
            else:
                piece.target.copy_(piece.box_of(rows))
            num_bytes += piece.target.nbytes
        return num_bytes

    def _read(self, memory: memoryview, offset: int) -> None:
        self._check()
        position = self._part.header.payload_offset + offset
        while memory:
            count = os.preadv(self._part.fd, [memory], position)
            if not count:
                raise PeerRefused("its file is shorter than its header says")
            memory, position = memory[count:], position + count

    def is_unchanged(self) -> bool:
        return self._part.is_unchanged()


def _readable(memory: mmap.mmap) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only
        return torch.frombuffer(memory, dtype=torch.uint8)


class RemotePart(_StoredPart):
    """A part that is read over a connection. The caller owns the connection, and uses it for the process's other parts,
    too.

    `connect_to_server`: returns it; a new one if it was closed meanwhile."""

    is_local = False

    def __init__(self, connect_to_server: Callable[[], Wire], generation: int, rank: int, step: int) -> None:
        self._connect = connect_to_server
        wire = connect_to_server()
        answer = call(wire, Request(verb=Verb.FIND, part=Part(generation=generation, rank=rank, step=step))).part
        if answer is None:
            raise PeerRefused("its answer contains no part")
        self._remote_part = answer
        self.index = _parse_index(wire.receive(answer.index_bytes), wire.receive(answer.extra_bytes), answer)

    def _request(self, pieces: Sequence[_Piece]) -> None:
        if pieces:
            ranges = tuple((piece.offset, piece.num_bytes) for piece in pieces)
            call(self._connect(), Request(verb=Verb.READ, part=self._remote_part, ranges=ranges))

    def _read(self, memory: memoryview, offset: int) -> None:
        self._connect().receive_into(memory)

    def is_unchanged(self) -> bool:
        wire = self._connect()
        wire.send_message(Request(verb=Verb.UNCHANGED, part=self._remote_part))
        return wire.receive_message(Answer).ok


_PIECE_BYTES = 32 << 20
"""Largest piece, unless a row is larger. A piece that is not read straight into its target needs scratch memory."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Whole rows of a saved slice that one fill needs: one range of the payload."""

    offset: int
    num_bytes: int
    read: ItemRead
    fill: Fill
    target: torch.Tensor
    """The rows of the fill's target that they fill."""

    @property
    def is_direct(self) -> bool:
        """The target takes whole rows, in one contiguous piece of CPU memory."""
        whole_rows = self.fill.lengths[1:] == self.read.item.sizes[1:]
        return whole_rows and self.target.device.type == "cpu" and self.target.is_contiguous()

    def box_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what the target takes of these rows, which are bytes."""
        values, sizes = rows.view(self.read.dtype), self.read.item.sizes
        if not sizes:
            return values.view(())
        return narrowed(values.view(-1, *sizes[1:]), (0, *self.fill.source_offsets[1:]), self.target.shape)


def _pieces(read: ItemRead) -> Iterator[_Piece]:
    item = read.item
    for fill in read.fills if item.nbytes else ():
        if not item.sizes:
            yield _Piece(item.file_offset, item.nbytes, read, fill, fill.target)
            continue
        row_bytes = item.nbytes // item.sizes[0]
        first_row, num_rows = fill.source_offsets[0], max(1, _PIECE_BYTES // row_bytes)
        for row in range(0, fill.lengths[0], num_rows):
            target = fill.target[row : row + num_rows]
            offset = item.file_offset + (first_row + row) * row_bytes
            yield _Piece(offset, len(target) * row_bytes, read, fill, target)


def _parse_index(index: bytes, extra: bytes, header: PartHeader | Part) -> ShardIndex:
    """The values of the slot's header replace those in the index, which was written once for many snapshots."""
    try:
        parsed = ShardIndex.from_json(index)
        values = {
            "rank": header.rank,
            "world_size": header.world_size,
            "generation": header.generation,
            "step": header.step,
            "extra": json.loads(extra),
        }
    except ValueError as error:
        raise PeerRefused(f"its index cannot be read ({error})") from None
    return parsed.model_copy(update=values)
