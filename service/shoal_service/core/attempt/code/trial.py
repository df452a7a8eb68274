"""The new code trains, and is on trial: the workers with the code before are kept until some steps are done.

    takes over      at a step boundary, from the snapshot of that step in memory
    accepted        after TRIAL_STEPS steps and TRIAL_S seconds that were not slower, or after the last step
    rolled back     it raises, its worker ends or hangs, or a step is not finite: the code before goes on from the step
                    at which the new one took over, as if there had been no update
                    its median step is slower: the code before takes over at the next step boundary; no step is lost

Called by `machine`, `reports` and `group/`. The loss of a node is not the code's fault: the trial goes on with the
workers that are left.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from shoal_service.core.attempt.code import update
from shoal_service.core.attempt.group import source
from shoal_service.core.attempt.group.outcome import Outcome, OutcomeDecision
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.code import Code, CodeUpdate, UpdatePhase
from shoal_service.core.attempt.state.snapshots import Discarded
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.code import CodeRolledBack, CodeUpdated
from shoal_workers.contract.ids import next_generation
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport, StepSkipped

TRIAL_STEPS = 5
"""Measured steps; the first one after the take-over is not measured."""
TRIAL_S = 1.0
SLOWER_FACTOR = 1.5
SLOWER_S = 0.01
"""A step counts as slower only if it is also slower by this much: steps of a few milliseconds vary by themselves."""
_KEPT_TIMES = 100
_NOT_OF_CODE = (
    IncidentCause.NODE_DIED,
    IncidentCause.NODE_UNREACHABLE,
    IncidentCause.UNREACHABLE,
    IncidentCause.PREEMPTED,
    IncidentCause.CORRUPTED,
    IncidentCause.SNAPSHOT_LOST,
    IncidentCause.DAMAGED_CHECKPOINT,
)


def why_back(state: Attempt) -> str:
    """Why the code before shall take over at the next step boundary; empty: it shall not."""
    trial = state.code.trial
    return trial.fault if trial is not None else ""


def turn_over(turn: Turn) -> None:
    """A group has stopped at a step boundary, and the next one is about to form: with which code?"""
    trial = turn.code.trial
    if trial is not None and trial.fault:
        roll_back(turn, trial.fault, keeps_steps=trial.keeps_steps)
    elif (
        turn.stage in (Stage.SWITCHING, Stage.COMMITTING)
        and not turn.target.ends_saved
        and update.readiness(turn.state)
    ):
        _take_over(turn)


def formed(turn: Turn) -> None:
    trial = turn.code.trial
    if trial is not None and trial.pause_s is None:
        pause_s = max(0.0, turn.now - trial.paused_at)
        turn.code = replace(turn.code, update=replace(trial, pause_s=pause_s))


def step_done(turn: Turn, report: StepReport) -> None:
    """The verdict, once it is due."""
    trial = turn.code.trial
    if trial is None or trial.fault:
        return
    if report.step > turn.group.start_step + 1:
        trial = replace(trial, step_times=(*trial.step_times, report.step_s)[-_KEPT_TIMES:])
        turn.code = replace(turn.code, update=trial)
    if turn.state.is_finishing:
        accept(turn)
    elif len(trial.step_times) >= TRIAL_STEPS and turn.now - trial.trial_since >= TRIAL_S:
        if slower := _why_slower(trial):
            turn.code = replace(turn.code, update=replace(trial, fault=slower))
        else:
            accept(turn)


def step_skipped(turn: Turn, report: StepSkipped) -> None:
    """`health.non_finite` skips a step whose loss is not finite; a loss scale that was too large is no fault."""
    trial = turn.code.trial
    if trial is not None and not trial.fault and report.loss is None:
        fault = f"the loss of step {report.step} is not finite"
        turn.code = replace(turn.code, update=replace(trial, fault=fault, keeps_steps=False))


def accept(turn: Turn) -> None:
    """The workers with the code before are not needed any more: `worker_pool` ends them."""
    trial = turn.code.trial
    if trial is None:
        return
    turn.code = Code(current=turn.code.current, wanted=turn.code.wanted)
    turn.emit(
        CodeUpdated(
            version=trial.version,
            before=trial.before,
            step=trial.step,
            pause_s=trial.pause_s,
            step_s=median(trial.step_times) if trial.step_times else None,
            step_s_before=trial.median_before_s,
        )
    )


def fault_of_the_new_code(state: Attempt, ended: OutcomeDecision) -> str:
    """What the new code has done wrong, if its group has ended by it; empty: the end has another reason."""
    if state.code.trial is None:
        return ""
    match ended.outcome:
        case Outcome.USER_ERROR | Outcome.ENGINE_ERROR | Outcome.EVERY_WORKER_FAILED | Outcome.NON_FINITE:
            error = ended.exits[0].error
            words = error.sentence if error is not None else ended.reason
            return f"{ended.reason}: {words}" if ended.outcome is Outcome.NON_FINITE else words
        case Outcome.LOST if state.incident is not None and state.incident.cause not in _NOT_OF_CODE:
            is_of_memory = any(one.kind is ExitKind.SNAPSHOT_LOST for one in ended.exits)
            return "" if is_of_memory else f"{state.incident.cause}: {state.incident.message}"
        case _:
            return ""


def roll_back(turn: Turn, reason: str, *, keeps_steps: bool) -> None:
    """The next group forms of workers with the code before. Without `keeps_steps` from the step at which the new code
    took over, if its state is still whole; else from the newest state, which the new code has trained."""
    trial = turn.code.trial
    assert trial is not None
    refused = trial.version if turn.code.wanted == trial.version else ""
    turn.code = Code(current=trial.before, wanted=turn.code.wanted, refused=refused)
    step = turn.progress.step
    if not keeps_steps and _can_restore(turn, trial):
        step = trial.step
        turn.progress = replace(turn.progress, step=step)
        turn.history = replace(turn.history, standing=trial.standing)
    turn.emit(CodeRolledBack(version=trial.version, before=trial.before, step=step, reason=reason))


def _take_over(turn: Turn) -> None:
    warming, state = turn.code.warming, turn.state
    assert warming is not None
    times = state.progress.step_times
    trial = CodeUpdate(
        version=warming.version,
        since=warming.since,
        phase=UpdatePhase.TRIAL,
        before=turn.code.current,
        trial_since=turn.now,
        generation=next_generation(state.group.generation, state.life),
        step=state.progress.step,
        standing=state.history.standing,
        paused_at=state.progress.advanced_at,
        median_before_s=median(times) if len(times) >= TRIAL_STEPS else None,
    )
    turn.code = replace(turn.code, current=warming.version, update=trial)


def _why_slower(trial: CodeUpdate) -> str:
    before_s = trial.median_before_s
    if before_s is None:
        return ""
    after_s = median(trial.step_times)
    if after_s <= max(SLOWER_FACTOR * before_s, before_s + SLOWER_S):
        return ""
    times = f"{after_s / before_s:.1f} times that of the code before ({before_s:.3g} s)"
    return f"its median step of {after_s:.3g} s is {times}"


def _can_restore(turn: Turn, trial: CodeUpdate) -> bool:
    """Whether the state of the step at which the new code took over is there. If so, the snapshots that the new code
    has made are not used any more. Its checkpoints are committed only once it is accepted."""
    known = turn.snapshots
    turn.snapshots = replace(known, discarded=Discarded(trial.generation, turn.group.generation))
    found = source.best_source(turn.state)
    newest = found.step if found is not None else turn.checkpoints.durable_step
    if newest == trial.step:
        return True
    turn.snapshots = known
    return False
