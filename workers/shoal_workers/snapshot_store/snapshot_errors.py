"""Errors of the snapshot store. None of them may end a job, since checkpoints in storage remain.

    SnapshotStoreError
    +-- SnapshotLost         a part of a snapshot cannot be read: restore from another source
    +-- SharedMemoryFull     there is no room for a snapshot: train on without snapshots, and log it

They survive pickling, since they cross process boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_workers.contract.base import FieldError


@dataclass(eq=False)
class SnapshotStoreError(FieldError):
    """Root of this tree. `code` is stable; the message is for people, made of the fields."""

    code = "snapshot_store_error"


@dataclass(eq=False)
class SnapshotLost(
    SnapshotStoreError,
    text=(
        "The part of rank {rank} in the snapshot of generation {generation} at step {step} cannot be read from "
        "the memory of node {node_id}: {why}."
    ),
):
    """The part of `rank` in the snapshot of `generation` at `step` cannot be read from the memory of `node_id`."""

    code = "snapshot_lost"
    generation: int
    step: int
    rank: int
    node_id: str
    why: str


@dataclass(eq=False)
class SharedMemoryFull(
    SnapshotStoreError,
    text=(
        "A snapshot needs {needed_bytes} bytes of shared memory in {directory}, where {free_bytes} are free: "
        "{why}. Give the machine (or container) more shared memory, or turn snapshots off with snapshot.enabled: "
        "false."
    ),
):
    """`needed_bytes` could not be allocated in `directory`."""

    code = "shared_memory_full"
    directory: str
    needed_bytes: int
    free_bytes: int
    why: str
