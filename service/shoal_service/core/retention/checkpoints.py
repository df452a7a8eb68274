"""Which checkpoints may be deleted: names in, names with reasons out.

`supervisor/checkpoints/catalog.py` calls this and deletes; this module never touches the storage.

    keep = 2      step-30 (torn, newest writer)   stays: it may still be committed
                  step-20  good                   stays
                  step-15  damaged                stays: fewer than 2 good ones are newer
                  step-10  good                   stays
                  step-05  good or damaged        is deleted
                  step-12  torn, older writer     is deleted: a later generation has committed

The newest good checkpoint is never deleted, nor is one that is in flight or that a user has pinned. A pinned one
counts as a newer one for others, so pins never make fewer than `keep` remain.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shoal_service.core.quantities import count_text
from shoal_workers.contract.marker import CheckpointName


@dataclass(frozen=True, slots=True)
class Deletion:
    """One checkpoint directory that may be deleted, and why."""

    name: CheckpointName
    reason: str


def choose_deletions(
    committed: Collection[CheckpointName],
    uncommitted: Collection[CheckpointName],
    *,
    keep: int,
    damaged: Collection[CheckpointName],
    in_flight: Collection[CheckpointName],
    pinned: Collection[CheckpointName] = (),
) -> tuple[Deletion, ...]:
    """The directories to delete, oldest first.

    `committed`: directories with a commit marker. `uncommitted`: those without. `damaged`: committed ones that failed
    verification; they do not count for `keep`. `in_flight`: those being written, committed or read; never deleted.
    `pinned`: never deleted, not even if they are damaged.
    """
    assert keep >= 1, f"keep is {keep}, and must be at least 1: the newest checkpoint is always kept"
    good = sorted(set(committed) - set(damaged), reverse=True)
    deletions = [
        Deletion(name, f"newer: {count_text(num_newer, 'good checkpoint')}; kept: {keep}")
        for name in committed
        if name not in in_flight and name not in pinned and (num_newer := sum(other > name for other in good)) >= keep
    ]
    newest_writer = max(good, key=_written_order, default=None)
    if newest_writer is not None:
        deletions += [
            Deletion(name, f"never committed, and {newest_writer} was written later")
            for name in uncommitted
            if name not in in_flight and _written_order(name) < _written_order(newest_writer)
        ]
    return tuple(sorted(deletions, key=lambda deletion: deletion.name))


def best_names(
    committed: Collection[CheckpointName], damaged: Collection[CheckpointName], steps: Collection[int]
) -> frozenset[CheckpointName]:
    """The checkpoint to keep for each of the best steps: the newest good one."""
    good = set(committed) - set(damaged)
    there = {name.step for name in good} & set(steps)
    return frozenset(max(name for name in good if name.step == step) for step in there)


def why_kept(
    name: CheckpointName, committed: Collection[CheckpointName], *, pinned: Collection[CheckpointName], is_over: bool
) -> str:
    """Why a user may not delete this checkpoint now, and the way out; empty: it may be deleted.

    A job that has not ended keeps its newest good checkpoint: it resumes from it, and retention relies on it when it
    deletes the others at the same moment.

    Args:
        committed: the job's good ones. `is_over`: the job has ended.
    """
    if name in pinned:
        return f"it is pinned; `shoal pin JOB {name.step} --undo` takes the pin away"
    if not is_over and name in committed and name == max(committed):
        which = "the only one" if len(committed) == 1 else "the newest one"
        needed = f"it is {which}, and the job, which has not ended, would resume from it"
        return f"{needed}. Wait for the next one, or cancel the job first"
    return ""


def _written_order(name: CheckpointName) -> tuple[int, int, int]:
    """Sort key for the time of writing: a later generation may repeat steps of an earlier one."""
    return name.attempt, name.generation, name.step
