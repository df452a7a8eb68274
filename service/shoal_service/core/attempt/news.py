"""What members tell while they run: formed, step done, part of a checkpoint durable; and what became of commits."""

from __future__ import annotations

from typing import assert_never

from shoal_service.core.attempt import leaving
from shoal_service.core.attempt.commands import Commit
from shoal_service.core.attempt.state import Stage
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import (
    Formed,
    SavedPart,
    SaveFailed,
    ShardNews,
    StepReport,
    ValidationReport,
)


def arrived(turn: Turn, index: int, item: ShardNews) -> None:
    """News of an older generation are dropped: a zombie can change nothing."""
    if item.generation != turn.state.generation or index not in turn.state.members:
        return
    match item:
        case Formed():
            _formed(turn, item)
        case StepReport():
            _step_done(turn, item)
        case SavedPart():
            _part_saved(turn, item)
        case SaveFailed():
            _save_failed(turn, item)
        case ValidationReport():
            pass  # shown, not decided upon
        case _:
            assert_never(item)


def committed(turn: Turn, name: str, generation: int, step: int) -> None:
    state = turn.state
    turn.set(committing=tuple(n for n in state.committing if n != name))
    newest = CheckpointName.parse(state.newest) if state.newest else None
    this = CheckpointName.parse(name)
    if name not in state.damaged and this is not None and (newest is None or this > newest):
        turn.set(newest=name)
    turn.emit("checkpoint.committed", name=name, step=step, generation=generation)
    leaving.after_commit(turn)


def commit_failed(turn: Turn, name: str, generation: int, message: str) -> None:
    turn.set(
        committing=tuple(n for n in turn.state.committing if n != name),
        failed_saves=(*turn.state.failed_saves, name),
    )
    turn.emit("checkpoint.failed", name=name, generation=generation, message=message)
    leaving.after_commit(turn)


def _formed(turn: Turn, item: Formed) -> None:
    state = turn.state
    if state.stage is not Stage.FORMING:
        return  # already quiescing
    turn.enter(Stage.RUNNING)
    lost = 0
    if state.incident is not None:
        lost = max(0, state.incident.step_before - item.start_step)
        turn.set(
            incident=state.incident.model_copy(
                update={
                    "formed_at": turn.now,
                    "form_s": item.form_s,
                    "restore_s": item.build_s + item.restore_s,
                    "steps_lost": lost,
                }
            ),
            steps_lost=state.steps_lost + lost - (state.incident.steps_lost or 0),
        )
        turn.show_incident()
    turn.set(step=item.start_step, start_step=item.start_step, total_steps=item.total_steps, formed_once=True)
    turn.emit(
        "generation.formed", generation=item.generation, workers=len(state.members), start_step=item.start_step,
        steps_lost=lost, form_s=item.form_s, build_s=item.build_s, restore_s=item.restore_s,
        num_parameters=item.num_parameters,
    )  # fmt: skip


def _step_done(turn: Turn, item: StepReport) -> None:
    turn.set(step=max(turn.state.step, item.step), fruitless=0)
    incident = turn.state.incident
    if incident is not None and incident.formed_at is not None and item.step > turn.state.start_step:
        turn.show_incident(closed=True)
        turn.emit(
            "incident.closed", id=incident.id, cause=incident.cause, recovery_s=turn.now - incident.at,
            steps_lost=incident.steps_lost, from_workers=incident.from_workers, to_workers=incident.to_workers,
        )  # fmt: skip
        turn.set(incident=None)


def _part_saved(turn: Turn, part: SavedPart) -> None:
    state = turn.state
    parts = {**state.parts.get(part.directory, {}), part.rank: part}
    name = str(CheckpointName(part.step, state.attempt, part.generation))
    if len(parts) < part.world_size:
        turn.set(parts={**state.parts, part.directory: parts})
        return
    turn.set(parts={d: p for d, p in state.parts.items() if d != part.directory}, committing=(*state.committing, name))
    turn.do(Commit(name, tuple(parts[rank] for rank in sorted(parts))))


def _save_failed(turn: Turn, item: SaveFailed) -> None:
    state = turn.state
    name = str(CheckpointName(item.step, state.attempt, item.generation))
    turn.set(parts={d: p for d, p in state.parts.items() if d != item.directory})
    if name not in state.failed_saves:
        turn.set(failed_saves=(*state.failed_saves, name))
        turn.emit(
            "checkpoint.failed", name=name, generation=item.generation, rank=item.rank, step=item.step,
            message=item.error,
        )  # fmt: skip
    leaving.after_commit(turn)
