"""Reports of a running group: formed, step done, part of a checkpoint durable; and the results of commits.

Called by `machine`. A report of an older generation never changes anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from shoal_service.core.attempt import validations, worker_pool
from shoal_service.core.attempt.code import trial
from shoal_service.core.attempt.faults import blame, hangs, stragglers, wrong_results
from shoal_service.core.attempt.group import follow_up, proofs, saved_parts, snapshot_reports
from shoal_service.core.attempt.state.stages import Running, Stage
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.checkpoints import CheckpointCommitted, CheckpointFailed
from shoal_service.core.events.generations import GenerationData, GenerationFormed, GenerationSettings
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.profiling.messages import Profiled
from shoal_workers.contract.worker_reports import (
    GroupFormed,
    PreemptionNotice,
    ReplayMismatch,
    ReplicaMismatch,
    ReplicasEqual,
    SavedPart,
    SaveFailed,
    SnapshotCost,
    SnapshotsStopped,
    StepReport,
    StepSkipped,
    ValidationReport,
    WorkerReport,
)


def arrived(turn: Turn, index: int, item: WorkerReport) -> None:
    """A report of an older generation is dropped."""
    if isinstance(item, PreemptionNotice):
        worker_pool.about_to_leave(turn, index, item)  # about the worker, whatever it does
        return
    if item.generation != turn.group.generation or index not in turn.group.ranks:
        return
    match item:
        case GroupFormed():
            _formed(turn, item)
        case StepReport():
            _step_done(turn, item)
        case SavedPart():
            saved_parts.arrived(turn, item)
        case SaveFailed():
            _save_failed(turn, item)
        case StepSkipped():
            wrong_results.step_skipped(turn, item)
            trial.step_skipped(turn, item)
        case ReplayMismatch():
            wrong_results.replay_differed(turn, item)
        case ReplicaMismatch():
            wrong_results.replicas_differed(turn, item)
        case ReplicasEqual():
            wrong_results.replicas_equal(turn, item)
        case SnapshotCost():
            turn.progress = replace(turn.progress, snapshots=item)
        case SnapshotsStopped():
            snapshot_reports.stopped(turn, item)
        case ValidationReport():
            validations.judged(turn, item)
            saved_parts.commit_whole(turn)
            follow_up.close_at_the_end(turn)
        case Profiled():
            pass  # it is the ProfileTaker's
        case _:
            assert_never(item)


def committed(turn: Turn, name: str, generation: int, step: int) -> None:
    _answered(turn, name)
    if turn.checkpoints.is_distrusted(name):
        wrong_results.distrust(turn, name)
        follow_up.after_commit(turn)
        return
    remember_newest(turn, name)
    wrong_results.saved(turn, name)
    if turn.history.skip_steps and step >= max(turn.history.skip_steps):
        turn.budgets = replace(turn.budgets, rollbacks=0)
    turn.emit(CheckpointCommitted(name=name, step=step, generation=generation))
    saved_parts.note_last_commit(turn, generation, step)
    follow_up.after_commit(turn)


def commit_failed(turn: Turn, name: str, generation: int, message: str) -> None:
    _answered(turn, name)
    turn.checkpoints = replace(turn.checkpoints, failed=(*turn.checkpoints.failed, name))
    turn.emit(CheckpointFailed(name=name, generation=generation, message=message))
    parsed = CheckpointName.parse(name)
    if parsed is not None:
        saved_parts.note_last_commit(turn, generation, parsed.step, message)
    follow_up.after_commit(turn)


def remember_newest(turn: Turn, name: str | None) -> None:
    """A checkpoint that can be restored. Commits and searches of the storage may be answered in any order."""
    state = turn.state
    this = CheckpointName.parse(name) if name else None
    newest = CheckpointName.parse(state.checkpoints.newest) if state.checkpoints.newest else None
    if this is not None and name not in state.checkpoints.damaged and (newest is None or this > newest):
        turn.checkpoints = replace(turn.checkpoints, newest=name)


def _answered(turn: Turn, name: str) -> None:
    turn.checkpoints = replace(
        turn.checkpoints,
        committing=tuple(n for n in turn.checkpoints.committing if n != name),
        parts={n: p for n, p in turn.checkpoints.parts.items() if n != name},
    )


def _formed(turn: Turn, item: GroupFormed) -> None:
    state = turn.state
    if state.stage not in (Stage.FORMING, Stage.SWITCHING, Stage.COMMITTING) or state.group.is_formed:
        return  # already quiescing, or reported twice
    if state.stage is Stage.FORMING:
        turn.enter(Running(since=turn.now))  # else a worker was reported to have left as planned before this report
    if state.incident is None:
        lost = max(0, state.progress.step - item.start_step)  # a switch whose save failed
        turn.history = replace(turn.history, steps_lost=turn.history.steps_lost + lost)
    else:
        lost = max(0, state.incident.before.step - item.start_step)
        after = state.incident.after and replace(
            state.incident.after,
            form_s=item.form_s,
            restore_s=item.build_s + item.restore_s,
            bytes_moved=item.restored_bytes,
        )
        turn.incident = replace(state.incident, after=after, formed_at=turn.now, steps_lost=lost)
        more = lost - (state.incident.steps_lost or 0)
        turn.history = replace(turn.history, steps_lost=turn.history.steps_lost + more)
        turn.show_incident()
    turn.group = replace(turn.group, is_formed=True, start_step=item.start_step)
    turn.budgets = turn.budgets.formed(item.start_step, turn.progress.furthest_step)
    wrong_results.formed(turn, item)
    trial.formed(turn)
    turn.history = replace(turn.history, has_formed=True, total_steps=item.total_steps)
    proofs.arrived(turn, item.proof)
    step = max([item.start_step, *(e.step for e in turn.group.exits.values())])
    turn.progress = replace(turn.progress, step=step, advanced_at=turn.now)
    layout = turn.group.layout
    if turn.group.changes:
        turn.emit(GenerationSettings(generation=item.generation, step=item.start_step, changes=turn.group.changes))
        turn.group = replace(turn.group, changes=())
    if item.data_before:
        turn.emit(
            GenerationData(generation=item.generation, step=item.start_step, before=item.data_before, now=item.data)
        )
    turn.emit(
        GenerationFormed(
            generation=item.generation,
            workers=len(turn.group.workers),
            start_step=item.start_step,
            steps_lost=lost,
            form_s=item.form_s,
            build_s=item.build_s,
            restore_s=item.restore_s,
            num_parameters=item.num_parameters,
            layout=layout.describe() if layout is not None else None,
        )
    )


def _step_done(turn: Turn, item: StepReport) -> None:
    state = turn.state
    is_new = item.step > state.progress.furthest_step
    turn.progress = replace(
        turn.progress,
        step=max(turn.progress.step, item.step),
        furthest_step=max(turn.progress.furthest_step, item.step),
        advanced_at=turn.now,
    )
    is_first = item.step == state.group.start_step + 1
    turn.progress = hangs.step_measured(turn.progress, item.step_s, is_first=is_first)
    if is_new and (turn.budgets.fruitless or turn.budgets.setbacks):
        turn.budgets = turn.budgets.advanced()
    stragglers.step_done(turn, item)
    trial.step_done(turn, item)
    saved_parts.commit_whole(turn)
    if state.health.hang is not None and item.step > state.health.hang.step:
        turn.health = replace(turn.health, hang=None)
    incident = state.incident
    if incident is not None and incident.formed_at is not None and item.step > state.group.start_step:
        blame.close(turn)


def _save_failed(turn: Turn, item: SaveFailed) -> None:
    state = turn.state
    name = str(CheckpointName(item.step, state.config.attempt, item.generation))
    parts = {n: p for n, p in turn.checkpoints.parts.items() if n != name}
    turn.checkpoints = replace(turn.checkpoints, parts=parts)
    if name not in state.checkpoints.failed:
        turn.checkpoints = replace(turn.checkpoints, failed=(*turn.checkpoints.failed, name))
        turn.emit(
            CheckpointFailed(
                name=name,
                generation=item.generation,
                rank=item.rank,
                step=item.step,
                message=item.error,
                stalled=item.is_stalled,
            )
        )
    follow_up.after_commit(turn)
