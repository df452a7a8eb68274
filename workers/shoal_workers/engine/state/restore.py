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

from shoal_workers.checkpoint.reader import fill
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.marker import CheckpointName
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
from shoal_workers.snapshot_store.transfer.loading import LoadResult

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


def is_restoring(assignment: Assignment) -> bool:
    """Returns False if the run starts from its seed."""
    return assignment.restore_snapshot is not None or assignment.restore_from is not None


def start_step(assignment: Assignment) -> int:
    """Return the completed steps of the state that an assignment names; 0 if training begins."""
    source = assignment.restore_snapshot
    return step_of_checkpoint(assignment.restore_from) if source is None else source.step


def step_of_checkpoint(url: str | None) -> int:
    """Return the step of a checkpoint's directory; 0 if there is none."""
    name = CheckpointName.parse((url or "").rstrip("/").rpartition("/")[2])
    return 0 if name is None else name.step


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
    is_own = origin is None or assignment.restore_snapshot is not None or assignment.restore_from != origin.url
    tensors = state.tensors_to_restore(assignment.restore_snapshot)
    optional = {name: owner for name, owner in may_be_absent(state.update).items() if name in tensors}
    loaded = read_source(membership, tensors, store, optional=optional)
    num_bytes = loaded.num_bytes
    if grown := grown_state(state.update, loaded.unread):
        # state that an optimizer makes only after its first update, and that the source has
        num_bytes += read_source(membership, {name: state.tensors()[name] for name in grown}, store).num_bytes
    state.update.drop_state(loaded.absent)
    extra = {**loaded.extra, "optimizer_values": _plain_values(loaded)}
    step, note = apply_extra(extra, state.update)
    if note:
        membership.say(note)
    state.update.fill_tied_copies()  # a tied weight is saved once, under its first name
    state.settle()
    changed = change_since(extra.get("data"), content_hash)
    return Restored(
        step=step,
        num_bytes=num_bytes,
        remote_bytes=loaded.remote_bytes,
        past=Recent.parse(extra.get("reports", ())) if is_own else (),
        loss_scale=extra.get("loss_scale"),
        data_change=changed,
        is_own=is_own,
        # other data has another order, to which the weights of the former one mean nothing
        weight_changes=from_json(extra.get("weight_changes", ())) if changed is None else (),
    )


def read_source(
    membership: Membership,
    tensors: Mapping[str, Tensor],
    store: SnapshotStore | None,
    *,
    optional: Mapping[str, str] | None = None,
) -> LoadResult:
    """Fill tensors from the snapshot or the checkpoint that the assignment names. Raises as `restore`.

    `optional`: those that the source may lack, each with its parameter's name."""
    assignment, source = membership.assignment, membership.assignment.restore_snapshot
    if source is not None:
        if store is None:
            reason = "this worker has no snapshot store"
            raise SnapshotLost(source.generation, source.step, 0, source.parts[0].node_id, reason)
        return store.load(tensors, source, check=membership.check, optional=optional)
    assert assignment.restore_from is not None
    filled = fill(tensors, directory=assignment.restore_from, optional=optional, advanced=_noted(membership))
    num_bytes = sum(local_tensor(tensor).nbytes for name, tensor in tensors.items() if name not in filled.absent)
    return LoadResult(filled.extra, num_bytes, 0, filled.other_extras, filled.absent, filled.unread)


def _plain_values(loaded: LoadResult) -> dict[str, object]:
    """The optimizer's values that are not tensors: each rank has saved those of its own parameters."""
    values: dict[str, object] = {}
    for extra in (*loaded.other_extras, loaded.extra):
        values |= extra.get("optimizer_values", {})
    return values


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
    told = json.dumps([restored.num_bytes, restored.remote_bytes, restored.frees_source, astuple(own)])
    all_restored = AllRestored(*json.loads(group.decide("restored", told, _sum_up)))
    if all_restored.differing_rank is not None:
        texts = group.gather("data", json.dumps([astuple(own), dict(parts())]))
        data, all_parts = zip(*map(json.loads, texts), strict=True)
        raise difference([RankData(*fields) for fields in data], all_parts, all_restored.differing_rank)
    return all_restored


def _sum_up(texts: Sequence[str]) -> str:
    """Sums up the texts of all ranks, on rank 0: the fields of `AllRestored`."""
    num_bytes, remote_bytes, frees_source, data = zip(*map(json.loads, texts), strict=True)
    differing = differing_rank([RankData(*fields) for fields in data])
    return json.dumps([sum(num_bytes), sum(remote_bytes), differing, all(frees_source)])
