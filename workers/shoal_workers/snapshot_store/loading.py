"""Fills a state of any layout from a whole snapshot in memory, part by part; what goes where says checkpoint/load_plan.

Each rank reads by itself: no collectives. A part of which this node has a copy is read here, also where the supervisor
named another node. When it raises, the state's values are neither the old nor the new ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shoal_workers.checkpoint.errors import CheckpointError
from shoal_workers.checkpoint.index import payload_name
from shoal_workers.checkpoint.load_plan import ItemRead, plan_load
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.snapshot_store.errors import SnapshotLost
from shoal_workers.snapshot_store.parts import LocalPart, ReadablePart, RemotePart
from shoal_workers.snapshot_store.slot_registry import SlotRegistry
from shoal_workers.snapshot_store.wire import PeerRefused, Wire, connect

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Loaded:
    extra: dict[str, Any]
    """What rank 0 of the snapshot's generation desired back."""
    local_bytes: int
    """Read from this node's memory."""
    remote_bytes: int
    """Read over the network."""


def load(
    state: Mapping[str, torch.Tensor],
    source: SnapshotSource,
    *,
    directory: SlotRegistry,
    node_id: str,
    key: str,
    check: Callable[[], None],
) -> Loaded:
    """SnapshotLost where a part cannot be had, or does not fit the state; whatever `check` raises."""
    assert len(source.parts) == source.world_size, source
    with ExitStack() as open_ones:
        reader = _Reader(source, directory, node_id, key, check, open_ones)
        parts = [reader.open(rank) for rank in range(source.world_size)]
        try:
            reads = plan_load(state, [part.index for part in parts], directory="in memory")
        except CheckpointError as error:
            raise reader.lost(0, str(error)) from None
        by_part: dict[str, list[ItemRead]] = defaultdict(list)
        for read in reads:
            by_part[read.file].append(read)
        num_bytes = {True: 0, False: 0}
        for rank, part in enumerate(parts):
            with reader.told_as_lost(rank):
                num_bytes[part.is_local] += part.fill(by_part[payload_name(rank)])
                if not part.is_unchanged():
                    raise PeerRefused("it was written over while it was read")
        return Loaded(extra=parts[0].index.extra, local_bytes=num_bytes[True], remote_bytes=num_bytes[False])


class _Reader:
    """The parts of one source, and one connection to each process that is asked for any."""

    def __init__(
        self,
        source: SnapshotSource,
        directory: SlotRegistry,
        node_id: str,
        key: str,
        check: Callable[[], None],
        open_ones: ExitStack,
    ) -> None:
        self._source = source
        self._directory = directory
        self._node_id = node_id
        self._key = key
        self._check = check
        self._open = open_ones
        self._wires: dict[SnapshotServer, Wire] = {}

    def open(self, rank: int) -> ReadablePart:
        source, endpoint = self._source, self._source.parts[rank]
        with self.told_as_lost(rank):
            self._check()
            here = self._open.enter_context(self._directory.open_part(source.generation, rank, source.step))
            part: ReadablePart
            if here is not None:
                part = LocalPart(here, self._check)
            elif endpoint.node_id == self._node_id:
                raise PeerRefused("it is not there any more, or not complete")
            else:
                part = RemotePart(self._wire(endpoint), source.generation, rank, source.step)
            if part.index.world_size != source.world_size:
                raise PeerRefused(f"it is of a world of {part.index.world_size}, not of {source.world_size}")
            return part

    @contextmanager
    def told_as_lost(self, rank: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.lost(rank, error.strerror or str(error)) from None

    def lost(self, rank: int, why: str) -> SnapshotLost:
        source = self._source
        return SnapshotLost(source.generation, source.step, rank, source.parts[rank].node_id, why)

    def _wire(self, endpoint: SnapshotServer) -> Wire:
        if endpoint not in self._wires:
            wire = connect(endpoint, self._key, check=self._check, patience_s=_PATIENCE_S)
            self._wires[endpoint] = self._open.enter_context(wire)
        return self._wires[endpoint]
