"""Reports of the group's workers: formed, steps done, parts saved, validations; each goes to whoever keeps it.

The engine judges validations in the same way and stops all ranks by itself; here the result is recorded for the next
group, for people, and for retention. Called by `machine`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from shoal_service.core.attempt import (
    checkpoints,
    code_update,
    forming,
    hangs,
    incidents,
    memory_snapshots,
    stragglers,
    worker_pool,
    wrong_results,
)
from shoal_service.core.attempt.state.stages import Running, Stage
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.training import (
    GenerationData,
    GenerationFormed,
    GenerationSettings,
    StoppedEarly,
    ValidationNotJudged,
)
from shoal_workers.contract.profiles import Profiled
from shoal_workers.contract.validation import LOSS, is_exhausted, judge, why_exhausted
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
    """Handle a report of a worker. A report of an older generation is dropped."""
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
            checkpoints.part_saved(turn, item)
        case SaveFailed():
            checkpoints.save_failed(turn, item)
        case StepSkipped():
            wrong_results.step_skipped(turn, item)
            code_update.trial_step_skipped(turn, item)
        case ReplayMismatch():
            wrong_results.replay_differed(turn, item)
        case ReplicaMismatch():
            wrong_results.replicas_differed(turn, item)
        case ReplicasEqual():
            checkpoints.replicas_equal(turn, item)
        case SnapshotCost():
            turn.progress = replace(turn.progress, snapshots=item)
        case SnapshotsStopped():
            memory_snapshots.snapshots_stopped(turn, item)
        case ValidationReport():
            _judged(turn, item)
            checkpoints.commit_whole(turn)
            incidents.close_at_the_end(turn)
        case Profiled():
            pass  # it is the ProfileTaker's
        case _:
            assert_never(item)


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
    checkpoints.group_formed(turn, item)
    code_update.trial_formed(turn)
    turn.history = replace(turn.history, has_formed=True, total_steps=item.total_steps)
    forming.proof_arrived(turn, item.proof)
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
    code_update.trial_step_done(turn, item)
    checkpoints.commit_whole(turn)
    if state.health.hang is not None and item.step > state.health.hang.step:
        turn.health = replace(turn.health, hang=None)
    incident = state.incident
    if incident is not None and incident.formed_at is not None and item.step > state.group.start_step:
        incidents.close(turn)


def _judged(turn: Turn, item: ValidationReport) -> None:
    spec, before = turn.target.spec, turn.history.standing
    rule = spec.validation
    standing = judge(before, rule, spec.checkpoint.keep_best, step=item.step, loss=item.loss, metrics=item.metrics)
    turn.history = replace(turn.history, standing=standing)
    needs_it = rule.patience is not None or spec.checkpoint.keep_best > 0
    if needs_it and rule.metric != LOSS and rule.metric not in item.metrics:
        known = tuple(sorted(item.metrics))
        turn.emit(ValidationNotJudged(step=item.step, metric=rule.metric, known=known))
    if is_exhausted(standing, rule):
        turn.history = replace(turn.history, total_steps=max(item.step, turn.progress.step))
        if not is_exhausted(before, rule):
            turn.emit(StoppedEarly(step=item.step, reason=why_exhausted(standing, rule)))
