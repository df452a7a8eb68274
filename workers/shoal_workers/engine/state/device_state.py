"""The state of a model and its optimizer while it trains, behind one interface for every kind of device.

    a GPU, and most optimizers of a task    `DeviceState`: the tensors stay where they are, and a snapshot is a copy
    a CPU, with an elementwise optimizer    `engine/cpu`: the tensors are in shared memory, which outlives the worker,
                                            so a snapshot costs no copy

`engine/cpu` hides all that only a CPU can do; whoever reads how a GPU trains need not read it. Made by `build_runtime`;
used by the trainer, by `Snapshots` and by `restore`. What a loop tracks is a `SnapshotState`, too.
"""

from __future__ import annotations

from torch import Tensor

from shoal_workers.contract.snapshots import SnapshotSource
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.state.training_state import StateView
from shoal_workers.engine.step.update import Update
from shoal_workers.snapshot_store.slots.slot_files import Stamp
from shoal_workers.snapshot_store.store import SnapshotStore


class SnapshotState:
    """A state as snapshots see it; without shared memory, so they are copies. Training thread only."""

    why_left = ""
    """Why the state went back to private memory, until that is said; empty: it did not."""
    why_copies = ""
    """Why snapshots are copies of the state, once it was to be moved; empty: it is in shared memory."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns, by name, the live tensors that this rank has a part of."""
        raise NotImplementedError

    @property
    def is_in_shared_memory(self) -> bool:
        return False

    def move_to_shared_memory(
        self,
        store: SnapshotStore,
        *,
        owns_replicated: bool,
        extra_bytes: int,
        restoring: SnapshotSource | None = None,
        with_values: bool = True,
    ) -> bool:
        """Called once the optimizer's state exists, between two steps or before a restore. False: it cannot be moved.

        Args:
            restoring: what the group is about to be restored from.
            with_values: keep the values. Otherwise they are arbitrary afterwards.

        Raises:
            SharedMemoryFull: nothing was moved, and later calls return False.
        """
        return False

    def finish(self, stamp: Stamp, extra_json: bytes) -> bool:
        """Mark the state in shared memory as complete. False: it is not there."""
        return False

    def finish_restored(self, stamp: Stamp, extra_json: bytes) -> bool:
        """Does the same after a restore, if the state was read into shared memory."""
        return False


class DeviceState(SnapshotState):
    """The state of a model and its optimizer, where the model has it. Training thread only."""

    def __init__(self, assembly: Assembly, update: Update) -> None:
        self.view = StateView(assembly, update)
        self.update = update
        self.why_copies = update.why_copies
        self.keeps_restored = True
        """What the group was restored from may still be needed after the first update; set before it."""

    def tensors(self) -> dict[str, Tensor]:
        return self.view.tensors()

    def step(self, lr_factor: float) -> None:
        """Makes one update."""
        self.update.step(lr_factor)

    def settle(self) -> None:
        """Called after an update or a restore, before `finish`: the optimizer may have more state, or less."""

    def holds(self, source: SnapshotSource | None) -> bool:
        """Returns whether the state in memory is this rank's part of the snapshot. Then the optimizer's state must not
        be materialised: others may read it at this moment."""
        return False

    def tensors_to_restore(self, source: SnapshotSource | None) -> dict[str, Tensor]:
        """Returns, before a restore, the tensors that must be overwritten."""
        return self.tensors()
