"""Opens the snapshot store of a worker. Called by the actor on the training thread, since it imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal_workers.contract.messages import WorkerConfig
from shoal_workers.contract.snapshots import SnapshotScope
from shoal_workers.snapshot_store.slots.registry import machine_id
from shoal_workers.snapshot_store.store import SnapshotStore


@dataclass(frozen=True, slots=True)
class Place:
    """Where the worker runs."""

    node_id: str
    node_ip: str


def open_snapshot_store(config: WorkerConfig, place: Place, say: Callable[[str], None]) -> SnapshotStore | None:
    """None: the node has no shared memory for snapshots; then the log tells the consequence."""
    try:
        return SnapshotStore(
            job_id=config.job_id,
            attempt=config.attempt,
            worker_id=config.worker_id,
            node_id=place.node_id,
            key=config.snapshot_key,
            host=place.node_ip,
            memory_id=place.node_id if config.snapshot_scope is SnapshotScope.NODE else machine_id(),
        )
    except OSError as error:
        say(f"no snapshots in memory: {error}. An unexpected death will cost the steps since the last checkpoint.")
        return None
