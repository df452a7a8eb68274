"""Snapshots as the supervisor sees them: which parts are in which node's memory, and from where to read them.

A snapshot is whole if the parts of all shards of one generation at one step are in the memory of live nodes. Parts of
dead processes count, because shared memory outlives its writer. Parts on dead nodes do not count; copies of them on
other nodes do.
"""

from __future__ import annotations

from enum import StrEnum

from shoal_workers.contract.base import Frozen


class SnapshotScope(StrEnum):
    """Which workers share the snapshots in shared memory."""

    MACHINE = "machine"
    """All workers of the attempt that see the same memory, whatever their Ray node."""
    NODE = "node"
    """The workers of one Ray node."""


class SnapshotPart(Frozen):
    """One shard's complete part of one snapshot, in the memory of one node. Every replica of the shard holds it."""

    generation: int
    rank: int
    """Number of the shard: the rank in a world of one replica (Layout.shard_of)."""
    world_size: int
    """Number of shards: the parts that the snapshot consists of."""
    step: int
    """Optimizer steps contained in the state."""
    num_bytes: int
    node_id: str


class SnapshotServer(Frozen):
    """A live worker that serves the parts in its node's memory."""

    node_id: str
    host: str
    port: int


class SnapshotSource(Frozen):
    """A whole snapshot to restore from, into any layout."""

    generation: int
    world_size: int
    step: int
    parts: tuple[SnapshotServer, ...]
    """The server of each part; the index is the number of the shard in that generation. A reader on the same node reads
    the shared memory instead of calling the worker."""
