"""Fills a generation's state from the source that its assignment names: a snapshot in memory, or a checkpoint; and ends
the forming, once all ranks have restored theirs and read the same data.

Rank 0 gets what each rank has read, and decides; the others get the decision only. If ranks read different data, all of
them exchange what they read, and raise the same error. Called by the trainer and the engine before the first step.
Never writes to a store or to a checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import Tensor

from shoal_workers.checkpoint.reader import Filled, fill
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.mixture_weights import InForce, from_json
from shoal_workers.contract.spec import ContinueFrom
from shoal_workers.contract.worker_reports import StepReport
from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.state.device_state import DeviceState
from shoal_workers.engine.state.training_state import Recent, apply_extra, grown_state, may_be_absent
from shoal_workers.engine.step.generation import Membership
from shoal_workers.engine.task.data_identity import DataChange, RankData, change_since, difference, differing_rank
from shoal_workers.snapshot_store.snapshot_errors import SnapshotLost
from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.snapshot_store.transfer.loading import Loaded

_NOTE_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Restored:
    """What one rank has read."""

    step: int
    num_bytes: int
    remote_bytes: int
    """Bytes that came from another node's memory."""
    past: tuple[StepReport, ...] = ()
    """Reports of the last steps before the state was saved; equal on all ranks."""
    loss_scale: dict[str, Any] | None = None
    data_change: DataChange | None = None
    """The state was made with other data than this rank reads."""
    is_own: bool = True
    """The state is of this job, not of the one that it goes on from."""
    weight_changes: tuple[InForce, ...] = ()
    """Changes of a mixture's weights that took effect before; equal on all ranks."""
    frees_source: bool = False
    """True if this rank no longer needs what it was restored from; it is freed once all ranks say so."""

    def __str__(self) -> str:
        return f"{self.step} {self.num_bytes} {self.remote_bytes} {int(self.frees_source)}"

    @staticmethod
    def parse(text: str) -> Restored:
        step, num_bytes, remote_bytes, frees_source = map(int, text.split())
        return Restored(step, num_bytes, remote_bytes, frees_source=bool(frees_source))


def is_restoring(assignment: Assignment) -> bool:
    """Returns False if the run starts from its seed."""
    return assignment.restore_snapshot is not None or assignment.restore_from is not None


def restore(
    membership: Membership,
    state: DeviceState,
    store: SnapshotStore | None,
    *,
    origin: ContinueFrom | None,
    content_hash: str,
) -> Restored:
    """Read into the live tensors what they do not hold already. No collective.

    Args:
        origin: the job that this one goes on from. Of its state, the optimizer's settings are not taken over, because
            those of this job may differ.
        content_hash: of the data that this rank reads.

    The optimizer's state must exist (`materialise_state`). Afterwards it is that of the source: a parameter that had
    none there has none.

    Raises:
        SnapshotLost: a part of the snapshot cannot be read; the values are neither the old nor the new ones.
        DamagedCheckpoint, StateMismatch, OSError: as the checkpoint's reader.
    """
    assignment = membership.assignment
    is_own = not _is_of_another_job(assignment, origin)
    tensors = state.tensors_to_restore(assignment.restore_snapshot)
    optional = {name: owner for name, owner in may_be_absent(state.update).items() if name in tensors}
    if assignment.restore_snapshot is not None:
        source = assignment.restore_snapshot
        if store is None:
            reason = "this worker has no snapshot store"
            raise SnapshotLost(source.generation, source.step, 0, source.parts[0].node_id, reason)
        restored_from: Loaded | Filled
        restored_from = loaded = store.load(tensors, source, check=membership.check, optional=optional)
        num_bytes, remote_bytes = loaded.local_bytes + loaded.remote_bytes, loaded.remote_bytes
    else:
        assert assignment.restore_from is not None
        restored_from = fill(tensors, directory=assignment.restore_from, optional=optional, advanced=_noted(membership))
        read = (tensor for name, tensor in tensors.items() if name not in restored_from.absent)
        num_bytes, remote_bytes = sum(local_tensor(tensor).nbytes for tensor in read), 0
    num_more = 0
    if grown := grown_state(state.update, restored_from.unread):
        num_more = _read_more(membership, {name: state.view.tensors()[name] for name in grown}, store)
    state.update.drop_state(restored_from.absent)
    extra = {**restored_from.extra, "optimizer_values": _plain_values(restored_from)}
    step, note = apply_extra(extra, state.update, is_own=is_own)
    if note and membership.rank == 0:
        membership.outbox.log_text(note)
    state.update.fill_tied_copies()  # a tied weight is saved once, under its first name
    state.settle()
    changed = change_since(extra.get("data"), content_hash)
    return Restored(
        step=step,
        num_bytes=num_bytes + num_more,
        remote_bytes=remote_bytes,
        past=Recent.parse(extra.get("reports", ())) if is_own else (),
        loss_scale=extra.get("loss_scale"),
        data_change=changed,
        is_own=is_own,
        # other data has another order, to which the weights of the former one mean nothing
        weight_changes=from_json(extra.get("weight_changes", ())) if changed is None else (),
    )


def _read_more(membership: Membership, tensors: dict[str, Tensor], store: SnapshotStore | None) -> int:
    """State that an optimizer makes only after its first update, and that the source has. Returns its bytes."""
    assignment = membership.assignment
    if assignment.restore_snapshot is not None:
        assert store is not None
        store.load(tensors, assignment.restore_snapshot, check=membership.check)
    else:
        assert assignment.restore_from is not None
        fill(tensors, directory=assignment.restore_from)
    return sum(local_tensor(tensor).nbytes for tensor in tensors.values())


def _plain_values(restored_from: Loaded | Filled) -> dict[str, object]:
    """The optimizer's values that are not tensors: each rank has saved those of its own parameters."""
    values: dict[str, object] = {}
    for extra in (*restored_from.other_extras, restored_from.extra):
        values |= extra.get("optimizer_values", {})
    return values


def _is_of_another_job(assignment: Assignment, origin: ContinueFrom | None) -> bool:
    """Return whether the state is that of the job which this one goes on from."""
    return origin is not None and assignment.restore_snapshot is None and assignment.restore_from == origin.url


def _noted(membership: Membership) -> Callable[[int], None]:
    """Shows the bytes read so far, some times per second: a long restore is not one that stands still."""
    noted_mono = time.monotonic()

    def advanced(num_bytes: int) -> None:
        nonlocal noted_mono
        membership.check()
        if time.monotonic() - noted_mono >= _NOTE_EVERY_S:
            noted_mono = time.monotonic()
            membership.position.note(f"reading the checkpoint: {num_bytes / (1 << 20):,.0f} MiB so far")

    return advanced


@dataclass(frozen=True, slots=True)
class AllRestored:
    """The outcome of a restore over all ranks, the same on every rank."""

    num_bytes: int
    remote_bytes: int
    differing_rank: int | None
    """See `data_identity.differing_rank`."""
    frees_source: bool
    """No rank needs what the group was restored from any more."""

    def __str__(self) -> str:
        return json.dumps(astuple(self))

    @staticmethod
    def parse(text: str) -> AllRestored:
        return AllRestored(*json.loads(text))


def when_all_have_restored(
    group: Group, restored: Restored, own: RankData, parts: Callable[[], Mapping[str, str]]
) -> AllRestored:
    """Waits for all ranks: one of them may find a damaged file or lost memory.

    Args:
        parts: content hashes of the parts of this rank's data; called only if ranks read different data.

    Raises:
        DataDiffers: on every rank alike, ranks read different data.
        FormFailed, Fenced: as `Group.form`.
    """
    all_restored = AllRestored.parse(group.decide("restored", f"{restored}\n{own}", _sum_up))
    if all_restored.differing_rank is not None:
        texts = group.gather("data", json.dumps([str(own), dict(parts())]))
        data, all_parts = zip(*map(json.loads, texts), strict=True)
        raise difference([RankData.parse(text) for text in data], all_parts, all_restored.differing_rank)
    return all_restored


def _sum_up(texts: Sequence[str]) -> str:
    """Sums up the texts of all ranks, on rank 0."""
    pairs = [text.split("\n") for text in texts]
    all_restored = [Restored.parse(restored) for restored, _ in pairs]
    decision = AllRestored(
        num_bytes=sum(restored.num_bytes for restored in all_restored),
        remote_bytes=sum(restored.remote_bytes for restored in all_restored),
        differing_rank=differing_rank([RankData.parse(data) for _, data in pairs]),
        frees_source=all(restored.frees_source for restored in all_restored),
    )
    return str(decision)
