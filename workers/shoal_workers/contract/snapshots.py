"""The RAM tier as the supervisor sees it: which snapshots lie in which node's memory, and where to read them.

A snapshot is whole when the parts of all ranks of one generation at one step lie on living nodes. Parts of dead
processes count: they lie in shared memory that outlives its writer. Parts of dead nodes do not, but their buddies'
copies do.
"""

from __future__ import annotations

from shoal_workers.contract.base import Frozen


class SnapshotPart(Frozen):
    """One rank's complete part of one snapshot, in the memory of one node."""

    generation: int
    rank: int
    world_size: int
    step: int
    """Optimizer steps contained in the state."""
    num_bytes: int
    node_id: str


class SnapshotServer(Frozen):
    """A living process that serves what lies in its node's memory."""

    node_id: str
    host: str
    port: int


class SnapshotSource(Frozen):
    """A whole snapshot to restore from, whatever the new layout is."""

    generation: int
    world_size: int
    step: int
    parts: tuple[SnapshotServer, ...]
    """By rank of that generation. A reader on the same node maps the memory instead of asking the process."""
