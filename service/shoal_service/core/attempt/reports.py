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
    scripts,
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
    is_script = turn.target.is_script
    lost = None if item.start_step is None else incidents.count_lost_steps(turn, item.start_step)
    if turn.incident is not None:
        after = turn.incident.after and replace(turn.incident.after, form_s=item.form_s)
        if after is not None and not is_script:
            after = replace(after, restore_s=item.build_s + item.restore_s, bytes_moved=item.restored_bytes)
        turn.incident = replace(turn.incident, after=after, formed_at=turn.now)
        turn.show_incident()
    turn.group = replace(turn.group, is_formed=True)
    if item.start_step is not None:
        _began_at(turn, item.start_step)
    elif not turn.group.is_start_known:
        turn.group = replace(turn.group, start_step=turn.progress.step)
    code_update.trial_formed(turn)
    total_steps = turn.history.total_steps if is_script else item.total_steps
    turn.history = replace(turn.history, has_formed=True, total_steps=total_steps)
    forming.proof_arrived(turn, item.proof)
    turn.progress = replace(turn.progress, advanced_at=turn.now)
    step = turn.group.start_step
    if turn.group.changes:
        turn.emit(GenerationSettings(generation=item.generation, step=step, changes=turn.group.changes))
        turn.group = replace(turn.group, changes=())
    if item.data_before:
        turn.emit(GenerationData(generation=item.generation, step=step, before=item.data_before, now=item.data))
    turn.emit(
        GenerationFormed(
            generation=item.generation,
            workers=len(turn.group.workers),
            start_step=item.start_step,
            steps_lost=lost,
            form_s=item.form_s,
            build_s=None if is_script else item.build_s,
            restore_s=None if is_script else item.restore_s,
            num_parameters=None if is_script else item.num_parameters,
            layout=turn.target.words_of(turn.group.layout) or None,
        )
    )
    if is_script:
        scripts.formed(turn)


def _began_at(turn: Turn, start_step: int) -> None:
    """The group has restored the state of this step, and goes on from there."""
    turn.group = replace(turn.group, start_step=start_step)
    turn.budgets = turn.budgets.formed(start_step, turn.progress.furthest_step)
    checkpoints.group_formed(turn, start_step)
    step = max([start_step, *(e.step for e in turn.group.exits.values())])
    turn.progress = replace(turn.progress, step=step)


def _step_done(turn: Turn, item: StepReport) -> None:
    is_first = not turn.group.is_start_known or item.step == turn.group.start_step + 1
    if not turn.group.is_start_known:
        scripts.begun(turn, max(0, item.step - 1))
    state = turn.state
    is_new = item.step > state.progress.furthest_step
    turn.progress = replace(
        turn.progress,
        step=max(turn.progress.step, item.step),
        furthest_step=max(turn.progress.furthest_step, item.step),
        advanced_at=turn.now,
    )
    if item.total_steps is not None:
        turn.history = replace(turn.history, total_steps=item.total_steps)  # a script says it with its steps
    turn.progress = hangs.step_measured(turn.progress, item.step_s, is_first=is_first)
    if is_new and (turn.budgets.fruitless or turn.budgets.setbacks):
        turn.budgets = turn.budgets.advanced()
    stragglers.step_done(turn, item)
    code_update.trial_step_done(turn, item)
    checkpoints.commit_whole(turn)
    if state.health.hang is not None and item.step > state.health.hang.step:
        turn.health = replace(turn.health, hang=None)
    incident = state.incident
    is_later = item.step > state.group.start_step or turn.target.is_script
    if incident is not None and incident.formed_at is not None and is_later:
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
