"""Parts of a checkpoint that are durable: once every rank's is, the checkpoint is committed. After the last step the
workers are notified, since their final validation waits for it.

Called by `reports`, and by `exits` for the part that a worker's exit carries.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.commands import Commit, NoteCommit
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart


def arrived(turn: Turn, part: SavedPart) -> None:
    """A part may arrive twice: in its own report and with the worker's exit, or again after a restart."""
    state = turn.state
    name = str(CheckpointName(part.step, state.config.attempt, part.generation))
    if name == state.checkpoints.newest or name in (*state.checkpoints.committing, *state.checkpoints.failed):
        return
    parts = {**state.checkpoints.parts.get(name, {}), part.rank: part}
    turn.checkpoints = replace(turn.checkpoints, parts={**turn.checkpoints.parts, name: parts})
    if len(parts) == part.world_size:
        turn.checkpoints = replace(turn.checkpoints, committing=(*turn.checkpoints.committing, name))
        turn.do(Commit(name, tuple(parts[rank] for rank in sorted(parts))))


def note_last_commit(turn: Turn, generation: int, step: int, error: str = "") -> None:
    """The checkpoint of this step is committed, or could not be."""
    state = turn.state
    if generation == state.group.generation and step == state.history.total_steps:
        turn.do(*(NoteCommit(index, generation, step, error) for index in state.in_run))
