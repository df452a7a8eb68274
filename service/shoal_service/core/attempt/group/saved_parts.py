"""Parts of a checkpoint that are durable: once every rank's is, the checkpoint is committed. After the last step the
workers are notified, since their final validation waits for it.

Called by `reports`, and by `exits` for the part that a worker's exit carries.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.commands import Commit, NoteCommit
from shoal_service.core.attempt.state.persistent.int_map import IntMap
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart


def arrived(turn: Turn, part: SavedPart) -> None:
    """A part may arrive twice: in its own report and with the worker's exit, or again after a restart."""
    state = turn.state
    name = str(CheckpointName(part.step, state.config.attempt, part.generation))
    if name == state.checkpoints.newest or name in (*state.checkpoints.committing, *state.checkpoints.failed):
        return
    parts = state.checkpoints.parts.get(name, IntMap()).with_item(part.rank, part)
    turn.checkpoints = replace(turn.checkpoints, parts={**turn.checkpoints.parts, name: parts})
    commit_whole(turn)


def commit_whole(turn: Turn) -> None:
    """Those of which every part is there. While new code is on trial, its checkpoints wait: they are not wanted if it
    is rolled back."""
    is_on_trial = turn.code.trial is not None and turn.stage is Stage.RUNNING and not turn.state.is_finishing
    for name, parts in turn.checkpoints.parts.items():
        is_whole = len(parts) == next(iter(parts.values())).world_size
        if is_whole and not is_on_trial and name not in turn.checkpoints.committing:
            turn.checkpoints = replace(turn.checkpoints, committing=(*turn.checkpoints.committing, name))
            turn.do(Commit(name, tuple(parts[rank] for rank in sorted(parts))))


def note_last_commit(turn: Turn, generation: int, step: int, error: str = "") -> None:
    """The checkpoint of this step is committed, or could not be."""
    state = turn.state
    if generation == state.group.generation and step == state.history.total_steps:
        turn.do(*(NoteCommit(index, generation, step, error) for index in state.in_run))
