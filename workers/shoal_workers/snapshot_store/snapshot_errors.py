"""Errors of the snapshot store. None of them may end a job, since checkpoints in storage remain.

    SnapshotStoreError
    +-- SnapshotLost         a part of a snapshot cannot be read: restore from another source
    +-- SharedMemoryFull     there is no room for a snapshot: train on without snapshots, and log it

They survive pickling, since they cross process boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(eq=False)
class SnapshotStoreError(Exception):
    """Root of this tree. `code` is stable; the message is for people, made of the fields."""

    code = "snapshot_store_error"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


@dataclass(eq=False)
class SnapshotLost(SnapshotStoreError):
    """The part of `rank` in the snapshot of `generation` at `step` cannot be read from the memory of `node_id`."""

    code = "snapshot_lost"
    generation: int
    step: int
    rank: int
    node_id: str
    why: str

    def __str__(self) -> str:
        return (
            f"The part of rank {self.rank} in the snapshot of generation {self.generation} at step {self.step} "
            f"cannot be read from the memory of node {self.node_id}: {self.why}."
        )


@dataclass(eq=False)
class SharedMemoryFull(SnapshotStoreError):
    """`needed_bytes` could not be allocated in `directory`."""

    code = "shared_memory_full"
    directory: str
    needed_bytes: int
    free_bytes: int
    why: str

    def __str__(self) -> str:
        return (
            f"A snapshot needs {self.needed_bytes} bytes of shared memory in {self.directory}, where {self.free_bytes} "
            f"are free: {self.why}. Give the machine (or container) more shared memory, or turn snapshots off "
            "with snapshot.enabled: false."
        )
