"""What members tell while they run: formed, step done, part of a checkpoint durable; and what became of commits."""

from __future__ import annotations

from typing import assert_never

from shoal_service.core.attempt import worker_pool
from shoal_service.core.attempt.commands import Commit
from shoal_service.core.attempt.faults import blame, sickness, stragglers
from shoal_service.core.attempt.faults.hangs import MEDIAN_OF
from shoal_service.core.attempt.group import judging
from shoal_service.core.attempt.state.attempt import Stage
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import (
    GroupFormed,
    PreemptionNotice,
    ReplayMismatch,
    SavedPart,
    SaveFailed,
    SnapshotCost,
    StepReport,
    StepSkipped,
    ValidationReport,
    WorkerReport,
)


def arrived(turn: Turn, index: int, item: WorkerReport) -> None:
    """News of an older generation are dropped: a zombie can change nothing."""
    if isinstance(item, PreemptionNotice):
        worker_pool.about_to_leave(turn, index, item)  # the worker says it of itself, whatever it is doing
        return
    if item.generation != turn.state.generation or index not in turn.state.members:
        return
    match item:
        case GroupFormed():
            _formed(turn, item)
        case StepReport():
            _step_done(turn, item)
        case SavedPart():
            _part_saved(turn, item)
        case SaveFailed():
            _save_failed(turn, item)
        case StepSkipped():
            sickness.step_skipped(turn, item)
        case ReplayMismatch():
            sickness.suspect_named(turn, item)
        case ValidationReport() | SnapshotCost():
            pass  # shown, not decided upon
        case _:
            assert_never(item)


def committed(turn: Turn, name: str, generation: int, step: int) -> None:
    _answered(turn, name)
    remember_newest(turn, name)
    if turn.state.skip_steps and step >= max(turn.state.skip_steps):
        turn.set(rollbacks=0)
    turn.emit("checkpoint.committed", name=name, step=step, generation=generation)
    judging.after_commit(turn)


def commit_failed(turn: Turn, name: str, generation: int, message: str) -> None:
    _answered(turn, name)
    turn.set(failed_saves=(*turn.state.failed_saves, name))
    turn.emit("checkpoint.failed", name=name, generation=generation, message=message)
    judging.after_commit(turn)


def remember_newest(turn: Turn, name: str | None) -> None:
    """A checkpoint that may be restored from; commits and searches of the storage may answer in any order."""
    state = turn.state
    this = CheckpointName.parse(name) if name else None
    newest = CheckpointName.parse(state.newest) if state.newest else None
    if this is not None and name not in state.damaged and (newest is None or this > newest):
        turn.set(newest=name)


def _answered(turn: Turn, name: str) -> None:
    state = turn.state
    turn.set(
        committing=tuple(n for n in state.committing if n != name),
        parts={n: p for n, p in state.parts.items() if n != name},
    )


def _formed(turn: Turn, item: GroupFormed) -> None:
    state = turn.state
    if state.stage not in (Stage.FORMING, Stage.SWITCHING, Stage.COMMITTING) or state.formed == state.generation:
        return  # already quiescing, or told twice
    if state.stage is Stage.FORMING:
        turn.enter(Stage.RUNNING)  # else a member's leaving as planned was acknowledged of first
    if state.incident is None:
        lost = max(0, state.step - item.start_step)  # a switch whose save failed
        turn.set(steps_lost=state.steps_lost + lost)
    else:
        lost = max(0, state.incident.step_before - item.start_step)
        turn.set(
            incident=state.incident.model_copy(
                update={
                    "formed_at": turn.now,
                    "form_s": item.form_s,
                    "restore_s": item.build_s + item.restore_s,
                    "steps_lost": lost,
                    "bytes_moved": item.restored_bytes,
                }
            ),
            steps_lost=state.steps_lost + lost - (state.incident.steps_lost or 0),
        )
        turn.show_incident()
    turn.set(
        formed=state.generation,
        step=max([item.start_step, *(e.step for e in state.exits.values())]),
        start_step=item.start_step,
        total_steps=item.total_steps,
        formed_once=True,
        progressed_at=turn.now,
    )
    turn.emit(
        "generation.formed", generation=item.generation, workers=len(state.members), start_step=item.start_step,
        steps_lost=lost, form_s=item.form_s, build_s=item.build_s, restore_s=item.restore_s,
        num_parameters=item.num_parameters, layout=state.layout.describe() if state.layout is not None else None,
    )  # fmt: skip


def _step_done(turn: Turn, item: StepReport) -> None:
    state = turn.state
    turn.set(
        step=max(state.step, item.step),
        fruitless=0,
        progressed_at=turn.now,
        step_times=(*state.step_times, item.step_s)[-MEDIAN_OF:],
    )
    stragglers.step_done(turn, item)
    if state.hang is not None and item.step > state.hang.step:
        turn.set(hang=None)
    incident = state.incident
    if incident is not None and incident.formed_at is not None and item.step > state.start_step:
        blame.close(turn)


def _part_saved(turn: Turn, part: SavedPart) -> None:
    state = turn.state
    name = str(CheckpointName(part.step, state.attempt, part.generation))
    if name == state.newest or name in (*state.committing, *state.failed_saves):
        return  # told twice, to a supervisor that was restarted; or in vain
    parts = {**state.parts.get(name, {}), part.rank: part}
    turn.set(parts={**state.parts, name: parts})
    if len(parts) == part.world_size:
        turn.set(committing=(*state.committing, name))
        turn.do(Commit(name, tuple(parts[rank] for rank in sorted(parts))))


def _save_failed(turn: Turn, item: SaveFailed) -> None:
    state = turn.state
    name = str(CheckpointName(item.step, state.attempt, item.generation))
    turn.set(parts={n: p for n, p in state.parts.items() if n != name})
    if name not in state.failed_saves:
        turn.set(failed_saves=(*state.failed_saves, name))
        turn.emit(
            "checkpoint.failed", name=name, generation=item.generation, rank=item.rank, step=item.step,
            message=item.error,
        )  # fmt: skip
    judging.after_commit(turn)
