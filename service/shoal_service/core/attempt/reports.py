"""Reports of the group's workers: formed, steps done, parts saved, validations, wrong results; and the slow ranks that
the reports of steps show.

The engine judges validations in the same way and stops all ranks by itself; here the result is recorded for the next
group, for people, and for retention.

A rank that computes much longer than the others in every step delays all of them:

    compute_s > health.straggler_factor x median of the others, for health.straggler_steps steps in a row
        -> an event, and the worker is replaced at a step boundary: by a warm standby, or by an extra worker once that
           is warm; it stays if none becomes warm within Timeouts.start_s

`compute_s` does not contain the time in which a rank waits for others, so only the slow rank is seen. The replacement
is a planned switch (`switching`), and no incident.

Steps that are not finite, ranks that compute wrong results, and ranks that hold wrong values:

    loss or gradient norm is not finite   health.non_finite decides: stop (`outcome`), skip the step (the engine),
                                          or roll back to the newest durable checkpoint and leave the step out
    a replayed micro-batch differs        the worker is killed, its node is suspected, and the group goes back to the
                                          newest durable checkpoint: the snapshots in memory are of a later time than
                                          the first wrong result
    replicas of the state differ          the same, for the ranks that others outvote. If there is no majority, all of
                                          them are suspected and none is killed; a fault that stays is detected again

After wrong results only what is older than the last clean comparison is trusted, see `checkpoints`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from shoal_service.core.attempt import checkpoints, code_update, forming, hangs, incidents, losses, memory_snapshots
from shoal_service.core.attempt.faults import FAULTS
from shoal_service.core.attempt.state import Attempt, Running, Stage, Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events import (
    GenerationData,
    GenerationFormed,
    GenerationSettings,
    NonFiniteStepSkipped,
    StoppedEarly,
    StragglerFound,
    StragglerKept,
    ValidationNotJudged,
)
from shoal_workers.contract import (
    LOSS,
    GroupFormed,
    IncidentCause,
    PreemptionNotice,
    Profiled,
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
    is_exhausted,
    judge,
    why_exhausted,
)


def handle_report(turn: Turn, index: int, item: WorkerReport) -> None:
    """Handle a report of a worker. A report of an older generation is dropped."""
    if isinstance(item, PreemptionNotice):
        forming.handle_notice(turn, index, item)  # about the worker, whatever it does
    elif item.generation == turn.group.generation and index in turn.group.ranks:
        _handle(turn, item)


def _handle(turn: Turn, item: WorkerReport) -> None:
    match item:
        case GroupFormed():
            _formed(turn, item)
        case StepReport():
            _step_done(turn, item)
        case SavedPart():
            checkpoints.keep_part(turn, item)
        case SaveFailed():
            checkpoints.handle_failed_save(turn, item)
        case StepSkipped():
            turn.progress = replace(turn.progress, step=max(turn.progress.step, item.step), advanced_at=turn.now)
            turn.emit(NonFiniteStepSkipped(step=item.step, loss=item.loss, grad_norm=item.grad_norm, ranks=item.ranks))
            code_update.note_skipped_trial_step(turn, item)
        case ReplayMismatch():
            _replay_differed(turn, item)
        case ReplicaMismatch():
            _replicas_differed(turn, item)
        case ReplicasEqual():
            checkpoints.trust_equal_replicas(turn, item)
        case SnapshotCost():
            turn.progress = replace(turn.progress, snapshots=item)
        case SnapshotsStopped():
            memory_snapshots.note_stopped_snapshots(turn, item)
        case ValidationReport():
            _judged(turn, item)
            checkpoints.commit_whole(turn)
            incidents.close_at_the_end(turn)
        case Profiled() | PreemptionNotice():
            pass  # the ProfileTaker reads the profile; a notice is handled in every generation
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
    code_update.note_formed_trial(turn)
    total_steps = turn.history.total_steps if is_script else item.total_steps
    turn.history = replace(turn.history, has_formed=True, total_steps=total_steps)
    forming.keep_proof(turn, item.proof)
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
            layout=turn.target.describe_layout(turn.group.layout) or None,
        )
    )
    if is_script:
        _script_formed(turn)


def _script_formed(turn: Turn) -> None:
    """Close the incident if no report of the script is to be expected, or it has come already."""
    if turn.incident is not None and not turn.state.has_reported:
        turn.incident = replace(turn.incident, formed_at=None)  # no first step is known, so it has no duration
        incidents.close(turn)
    elif turn.incident is not None and turn.group.is_start_known:
        incidents.close(turn)


def note_long_run(turn: Turn) -> None:
    """Note that a group of a script has run for long. Acts in RUNNING only."""
    if not turn.state.has_run_long(turn.now):
        return
    if not turn.history.has_run_long:
        turn.history = replace(turn.history, has_run_long=True)
    if turn.budgets.fruitless or turn.budgets.setbacks:
        turn.budgets = turn.budgets.advanced()
    code_update.accept(turn)


def _script_begun(turn: Turn, start_step: int) -> None:
    """The first report of a group has shown the step at which its script has gone on."""
    incidents.count_lost_steps(turn, start_step)
    turn.group = replace(turn.group, start_step=start_step, is_start_known=True)
    turn.budgets = turn.budgets.formed(start_step, turn.progress.furthest_step)
    turn.progress = replace(turn.progress, step=start_step)


def _began_at(turn: Turn, start_step: int) -> None:
    """The group has restored the state of this step, and goes on from there."""
    turn.group = replace(turn.group, start_step=start_step)
    turn.budgets = turn.budgets.formed(start_step, turn.progress.furthest_step)
    checkpoints.note_formed_group(turn, start_step)
    step = max([start_step, *(e.step for e in turn.group.exits.values())])
    turn.progress = replace(turn.progress, step=step)


def _step_done(turn: Turn, item: StepReport) -> None:
    is_first = not turn.group.is_start_known or item.step == turn.group.start_step + 1
    if not turn.group.is_start_known:
        _script_begun(turn, max(0, item.step - 1))
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
    turn.progress = hangs.add_step_time(turn.progress, item.step_s, is_first=is_first)
    if is_new and (turn.budgets.fruitless or turn.budgets.setbacks):
        turn.budgets = turn.budgets.advanced()
    _find_slow_rank(turn, item)
    code_update.judge_trial_step(turn, item)
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


def _replay_differed(turn: Turn, item: ReplayMismatch) -> None:
    state = turn.state
    if not 0 <= item.rank < len(state.group.workers) or not state.group_active:
        return
    message = (
        f"rank {item.rank} computes wrong results: {item.message}; snapshots in memory may hold them, so the state "
        "comes from the newest durable checkpoint"
    )
    every_steps = state.target.spec.health.replay_every_steps
    if every_steps is not None:
        checkpoints.distrust_later_than(turn, max(0, item.step - 1 - every_steps))
    losses.evict(turn, state.group.workers[item.rank], IncidentCause.CORRUPTED, "replay", message)


def _replicas_differed(turn: Turn, item: ReplicaMismatch) -> None:
    state = turn.state
    if not state.group_active or not all(0 <= rank < len(state.group.workers) for rank in item.ranks):
        return
    workers = [state.group.workers[rank] for rank in item.ranks]
    message = f"{item.message}; the state comes from the newest checkpoint that is not later than step "
    message += f"{state.checkpoints.clean_step or 0}, the last that was found equal on all ranks"
    checkpoints.distrust_later_than(turn, state.checkpoints.clean_step or 0)
    if item.is_certain:
        for index in workers:
            losses.evict(turn, index, IncidentCause.CORRUPTED, "replicas", message)
        return
    losses.lose_group(turn, IncidentCause.CORRUPTED, "replicas", message)
    for index in workers:
        worker = turn.pool.worker(index)
        if worker is not None and worker.info is not None:
            losses.suspect(turn, worker.node_id, item.message)


_PAUSE = 10
"""After a straggler was named, the next one is named no earlier than this many times health.straggler_steps later."""


def _find_slow_rank(turn: Turn, report: StepReport) -> None:
    """Count slow steps by worker, and name the slowest worker once it was slow for health.straggler_steps."""
    slow_steps = _count_slow_steps(turn.state, report)
    if slow_steps is not None:
        turn.progress = replace(turn.progress, slow_steps=slow_steps)
        index = _find_straggler(turn.state, report)
        if index is not None:
            _name_straggler(turn, index, report)


def _count_slow_steps(state: Attempt, report: StepReport) -> dict[int, int] | None:
    """Count the slow steps in a row of each slow worker, this step included, by worker index; None if the ranks cannot
    be compared."""
    factor, workers = state.target.spec.health.straggler_factor, state.group.workers
    if factor is None or len(report.compute_s) != len(workers) or len(workers) < 2:
        return None
    ordered = sorted(report.compute_s)
    return {
        index: state.progress.slow_steps.get(index, 0) + 1
        for rank, index in enumerate(workers)
        if report.compute_s[rank] > factor * _median_without(ordered, report.compute_s[rank])
    }


def _find_straggler(state: Attempt, report: StepReport) -> int | None:
    """Find the slowest of the workers that were slow for health.straggler_steps in a row; None if there is none, or
    one was named a short time ago."""
    limit, ranks = state.target.spec.health.straggler_steps, state.group.ranks
    slow = [index for index, steps in state.progress.slow_steps.items() if steps >= limit]
    if report.step < state.health.no_straggler_before:
        return None
    return max(slow, key=lambda index: report.compute_s[ranks[index]], default=None)


def keep_stragglers_without_replacement(turn: Turn) -> None:
    """Keep a slow worker if no other one became warm in time: a slow worker is better than none."""
    for worker in turn.pool.workers:
        if worker.slow_until is not None and turn.now >= worker.slow_until and worker.index in turn.group.ranks:
            turn.pool = turn.pool.with_worker(replace(worker, slow_until=None))
            turn.emit(
                StragglerKept(
                    worker_id=worker.worker_id,
                    rank=turn.group.rank_of(worker.index),
                    message=f"no other worker became warm within {turn.config.timeouts.start_s:g} s",
                )
            )


def _name_straggler(turn: Turn, index: int, report: StepReport) -> None:
    state = turn.state
    worker = state.pool.worker(index)
    if worker is None or worker.info is None or worker.slow_until is not None:
        return
    rank = state.group.ranks[index]
    node_id = worker.node_id
    pause = _PAUSE * state.target.spec.health.straggler_steps
    turn.health = replace(turn.health, no_straggler_before=report.step + pause)
    turn.progress = replace(turn.progress, slow_steps={})
    turn.emit(
        StragglerFound(
            worker_id=worker.worker_id,
            rank=rank,
            node_id=node_id,
            compute_s=report.compute_s[rank],
            median_s=_median_without(sorted(report.compute_s), report.compute_s[rank]),
            step=report.step,
            action="replaced by a spare" if _has_spare(turn, worker) else "an extra worker is started",
        )
    )
    turn.pool = turn.pool.with_worker(replace(worker, slow_until=turn.now + state.config.timeouts.start_s))
    if losses.is_alone(state, node_id, besides=index):
        losses.suspect(turn, node_id, FAULTS[IncidentCause.STRAGGLER].description)


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Compute the median of all values without `value`. `ordered`: at least two values, rising."""
    at, num_others = bisect_left(ordered, value), len(ordered) - 1

    def other(number: int) -> float:
        return ordered[number if number < at else number + 1]

    return (other((num_others - 1) // 2) + other(num_others // 2)) / 2


def _has_spare(turn: Turn, slow: Worker) -> bool:
    return any(p.index not in turn.group.ranks and p.slow_until is None for p in turn.state.usable if p != slow)
