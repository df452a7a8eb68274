"""Fills a generation's state from the source that its assignment names: a snapshot in memory, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal_workers.checkpoint.reader import load
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.messages import Assignment, StepReport
from shoal_workers.engine.state.double_buffered_state import DoubleBufferedState
from shoal_workers.engine.state.recent_reports import Recent
from shoal_workers.engine.state.training_state import apply_extra
from shoal_workers.engine.step.update import Update
from shoal_workers.snapshot_store.errors import SnapshotLost
from shoal_workers.snapshot_store.store import SnapshotStore


@dataclass(frozen=True, slots=True)
class Restored:
    """What one rank has read."""

    step: int
    num_bytes: int
    remote_bytes: int
    """From another node's memory."""
    past: tuple[StepReport, ...] = ()
    """What the state knows of the steps that led to it; equal on all ranks."""
    loss_scale: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.step} {self.num_bytes} {self.remote_bytes}"

    @staticmethod
    def parse(text: str) -> Restored:
        step, num_bytes, remote_bytes = map(int, text.split())
        return Restored(step, num_bytes, remote_bytes)


def is_restoring(assignment: Assignment) -> bool:
    """False: the run starts from its seed."""
    return assignment.restore_snapshot is not None or assignment.restore_from is not None


def restore(
    living: DoubleBufferedState,
    update: Update,
    assignment: Assignment,
    ram: SnapshotStore | None,
    check: Callable[[], None],
) -> Restored:
    """Read into the live tensors what is not there already; the optimizer's state must exist. Training thread, every
    rank by itself.

    Raises:
        SnapshotLost: a part of the snapshot cannot be read; the values are neither the old nor the new ones.
        DamagedCheckpoint, StateMismatch, OSError: as the checkpoint's reader.
    """
    tensors = living.to_read(assignment.restore_snapshot)
    if assignment.restore_snapshot is not None:
        source = assignment.restore_snapshot
        if ram is None:
            raise SnapshotLost(
                source.generation, source.step, 0, source.parts[0].node_id, "this process has no RAM tier"
            )
        loaded = ram.load(tensors, source, check=check)
        extra, num_bytes, remote_bytes = loaded.extra, loaded.local_bytes + loaded.remote_bytes, loaded.remote_bytes
    else:
        assert assignment.restore_from is not None
        extra = load(tensors, directory=assignment.restore_from)
        num_bytes, remote_bytes = sum(local_tensor(tensor).nbytes for tensor in tensors.values()), 0
    update.fill_twins()
    return Restored(
        step=apply_extra(extra, update),
        num_bytes=num_bytes,
        remote_bytes=remote_bytes,
        past=Recent.parse(extra.get("reports", ())),
        loss_scale=extra.get("loss_scale"),
    )
