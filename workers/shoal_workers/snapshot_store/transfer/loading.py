"""Fills a state of any layout from a whole snapshot in memory, part by part, as `checkpoint/loading` plans it.

Each rank reads on its own, without collectives, and opens part 0 and the parts of which it needs something. If this
node has a copy of a part, the part is read here, even if the supervisor named another node. A part that exists only as
a log is replayed by the process that the supervisor named. If it raises, some of the state's values may have been
replaced and others not. Called by the snapshot store, on the training thread.
"""

from __future__ import annotations

import gc
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal_workers.checkpoint.errors import CheckpointError
from shoal_workers.checkpoint.index import ShardIndex, payload_name
from shoal_workers.checkpoint.loading.load_plan import ItemRead, Shape, plan_needed
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.snapshot_store.errors import SnapshotLost
from shoal_workers.snapshot_store.slots.registry import OpenPart, SlotRegistry
from shoal_workers.snapshot_store.transfer.parts import LocalPart, ReadablePart, RemotePart
from shoal_workers.snapshot_store.transfer.wire import PeerRefused, Wire, connect

_PATIENCE_S = 5.0
_QUEUE_S = 20.0
"""A server accepts a connection only when it has a free thread: a thousand ranks may want part 0 at once."""

Mapped = Callable[[int, int], mmap.mmap | None]
"""For a descriptor and a number of bytes: a map of at least these bytes of the file, if this process has one."""


@dataclass(frozen=True, slots=True)
class Loaded:
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


def load(
    state: Mapping[str, torch.Tensor],
    source: SnapshotSource,
    *,
    registry: SlotRegistry,
    mapped: Mapped,
    node_id: str,
    key: str,
    check: Callable[[], None],
    optional: Mapping[str, str] | None = None,
) -> Loaded:
    """SnapshotLost if a part cannot be read, or does not fit the state. An error that `check` raises passes through.

    `optional`: as for `plan_needed`."""
    assert len(source.parts) == source.world_size, source
    registry.scan()
    with ExitStack() as resources:
        resources.enter_context(_paused_collector())
        reader = _Reader(source, registry, mapped, node_id, key, check, resources)
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
        return Loaded(
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
        mapped: Mapped,
        node_id: str,
        key: str,
        check: Callable[[], None],
        resources: ExitStack,
    ) -> None:
        self._source = source
        self._registry = registry
        self._mapped = mapped
        self._node_id = node_id
        self._key = key
        self._check = check
        self._resources = resources
        self._wire: tuple[SnapshotServer, Wire] | None = None
        self.parts: dict[int, ReadablePart] = {}
        """By rank."""
        resources.callback(self._hang_up)

    def indexes(self, ranks: Sequence[int]) -> list[ShardIndex]:
        """Opens the parts of these ranks."""
        for rank in ranks:
            self.parts[rank] = self._open(rank)
        return [self.parts[rank].index for rank in ranks]

    def _open(self, rank: int) -> ReadablePart:
        source, server = self._source, self._source.parts[rank]
        with self.raises_snapshot_lost(rank):
            self._check()
            here = self._open_here(rank)
            part: ReadablePart
            if here is None and server.node_id == self._node_id:
                # not as a file: the process that the supervisor named makes one, once for all ranks of this node
                self._remote(rank)
                here = self._open_here(rank, scans=True)
                if here is None:
                    raise PeerRefused("it no longer exists, or is not complete")
            part = LocalPart(here, self._check, self._mapped) if here is not None else self._remote(rank)
            if part.index.world_size != source.world_size:
                raise PeerRefused(f"its world size is {part.index.world_size}, not {source.world_size}")
            return part

    def _open_here(self, rank: int, *, scans: bool = False) -> OpenPart | None:
        opened = self._registry.open_part(self._source.generation, rank, self._source.step, scans=scans)
        return self._resources.enter_context(opened)

    def _remote(self, rank: int) -> RemotePart:
        source = self._source
        return RemotePart(lambda: self._connected(source.parts[rank]), source.generation, rank, source.step)

    @contextmanager
    def raises_snapshot_lost(self, rank: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.lost(rank, error.strerror or str(error)) from None

    def lost(self, rank: int, why: str) -> SnapshotLost:
        source = self._source
        return SnapshotLost(source.generation, source.step, rank, source.parts[rank].node_id, why)

    def _connected(self, server: SnapshotServer) -> Wire:
        if self._wire is None or self._wire[0] != server:
            self._hang_up()
            wire = connect(server, self._key, check=self._check, patience_s=_PATIENCE_S, queue_s=_QUEUE_S)
            self._wire = server, wire
        return self._wire[1]

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire[1].__exit__()
            self._wire = None
