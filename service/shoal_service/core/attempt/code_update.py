"""Another version of the job's code takes over from the one that trains, without a pause, and is on trial at first.

    requested -> as many workers as the group has, each on the node of one of them -> the model is compared -> ready
        refused: a worker cannot load the code, ends before it is warm, or builds another model; or it takes too long
    takes over      at a step boundary, from the snapshot of that step in memory; the workers with the code before are
                    kept until the trial is over
    accepted        after TRIAL_STEPS steps and TRIAL_S seconds that were not slower, or after the last step
    rolled back     it raises, its worker ends or hangs, or a step is not finite: the code before goes on from the step
                    at which the new one took over, as if there had been no update
                    its median step is slower: the code before takes over at the next step boundary; no step is lost

A script is asked to end, and started again with the new code. That is accepted once it reports a step beyond those of
the code before, or has run for a minute, or is done; an error before that starts it with the code before.

Whatever happens to the group meanwhile is handled as ever. A refused update changes nothing, and the loss of a node is
not the code's fault: the trial goes on with the workers that are left. It never ends the attempt.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import median

from shoal_service.core.attempt import memory_snapshots
from shoal_service.core.attempt.messages import CompareModels
from shoal_service.core.attempt.state import Attempt, Code, CodeUpdate, Discarded, Stage, UpdatePhase, Worker, short
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.events import CodeRefused, CodeRolledBack, CodeUpdated, CodeUpdating
from shoal_service.core.quantities import count_text
from shoal_workers.contract import StepReport, StepSkipped, next_generation


def request(turn: Turn, version: str) -> None:
    """Note that a directive names another version. While new code is on trial, the next version waits for the
    verdict."""
    turn.target = turn.target.with_code(version)
    turn.code = replace(turn.code, wanted=version, refused="")
    update = turn.code.warming
    if update is not None and update.version != version:
        _give_up(turn, update, "another version is wanted")


def consider(turn: Turn) -> None:
    """Advance the update that is requested. Acts in RUNNING only: a group that was lost is formed again first."""
    if turn.stage is not Stage.RUNNING or turn.incident is not None or turn.target.saves_and_ends:
        return
    code, update = turn.code, turn.code.warming
    if code.update is None and code.wanted not in (None, code.current, code.refused):
        assert code.wanted is not None
        update = CodeUpdate(version=code.wanted, since=turn.now)
        turn.code = replace(code, update=update)
        turn.emit(CodeUpdating(version=update.version, before=code.current))
    if update is None:
        return
    if turn.now - update.since > turn.config.timeouts.start_s:
        waited = f"its workers were not ready within timeouts.start_s ({turn.config.timeouts.start_s:g} s)"
        refuse(turn, f"{waited}: {readiness(turn.state).reason}")
        return
    _start_missing(turn, update)
    _compare(turn, update)


def readiness(state: Attempt) -> Decision:
    """Decide if the new code takes over at the next step boundary."""
    update = state.code.warming
    if update is None:
        return Decision(False, "no code is to be updated")
    cohort = _cohort(state, update)
    num_ready, num_needed = sum(worker.is_usable for worker in cohort), _num_needed(state)
    if num_ready < num_needed:
        return Decision(
            False, f"{num_ready} of {count_text(num_needed, 'worker')} with code {short(update.version)} became warm"
        )
    if not update.is_same_model and not state.target.is_program:
        return Decision(False, "one of them builds the model")
    if not state.target.is_script and state.progress.step <= state.group.start_step:
        return Decision(False, "the group has completed no step yet")
    return Decision(True, f"code {short(state.code.current)} -> {short(update.version)}")


def refuse_if_part_of_update(turn: Turn, worker: Worker, reason: str) -> bool:
    """Refuse the update if this worker, which could not start, belongs to it. Return False if it does not."""
    update = turn.code.warming
    if update is None or worker.code != update.version:
        return False
    refuse(turn, reason)
    return True


def note_comparison(turn: Turn, worker: Worker, difference: str) -> None:
    """Note the result of a comparison. `difference` is in words; empty if the models are equal."""
    update = turn.code.warming
    if update is None or worker.code != update.version:
        return  # of an update that is over
    if difference:
        refuse(turn, difference)
    else:
        turn.code = replace(turn.code, update=replace(update, comparing=False, is_same_model=True))


def refuse(turn: Turn, reason: str) -> None:
    """Refuse the update: the group trains on with its code."""
    update = turn.code.warming
    assert update is not None
    turn.emit(CodeRefused(version=update.version, before=turn.code.current, reason=reason))
    _give_up(turn, update, "its code was refused")


def _give_up(turn: Turn, update: CodeUpdate, reason: str) -> None:
    for worker in _cohort(turn.state, update):
        turn.kill(worker.index, reason)
    refused = update.version if turn.code.wanted == update.version else ""
    turn.code = Code(current=turn.code.current, wanted=turn.code.wanted, refused=refused)


def _cohort(state: Attempt, update: CodeUpdate) -> list[Worker]:
    return [worker for worker in state.pool.workers if worker.code == update.version]


def _num_needed(state: Attempt) -> int:
    return min(len(state.group.workers), state.target.granted)


def _start_missing(turn: Turn, update: CodeUpdate) -> None:
    """Start the missing workers with the new code, each on the node of a worker whose place it will take. It needs no
    room there."""
    state = turn.state
    cohort = _cohort(state, update)
    nodes = Counter(state.group.nodes) - Counter(worker.only_on for worker in cohort)
    for node_id in list(nodes.elements())[: max(0, _num_needed(state) - len(cohort))]:
        turn.start_worker(update.version, only_on=node_id, is_beside=True)


def _compare(turn: Turn, update: CodeUpdate) -> None:
    """Have the first warm worker with the new code build the model. If it is lost before it has answered, the update is
    refused or another worker is asked. What a program builds is its own matter."""
    if update.is_same_model or update.comparing or turn.target.is_program:
        return
    first = next((worker for worker in _cohort(turn.state, update) if worker.is_usable), None)
    if first is not None:
        turn.code = replace(turn.code, update=replace(update, comparing=True))
        turn.do(CompareModels(first.index, turn.group.workers[0]))


TRIAL_STEPS = 5
"""Measured steps after which the verdict is due. The first step after the take-over is not measured."""
TRIAL_S = 1.0
SLOWER_FACTOR = 1.5
SLOWER_S = 0.01
"""A step counts as slower only if it takes at least this many seconds more: steps of a few milliseconds vary by
themselves."""
_KEPT_TIMES = 100


def turn_over(turn: Turn) -> None:
    """A group has stopped at a step boundary: decide with which code the next group forms."""
    trial = turn.code.trial
    if trial is not None and trial.fault:
        roll_back(turn, trial.fault, keeps_steps=trial.keeps_steps)
    elif turn.stage in (Stage.SWITCHING, Stage.COMMITTING) and not turn.target.saves_and_ends and readiness(turn.state):
        _take_over(turn)


def note_formed_trial(turn: Turn) -> None:
    trial = turn.code.trial
    if trial is not None and trial.pause_s is None:
        pause_s = max(0.0, turn.now - trial.paused_at)
        turn.code = replace(turn.code, update=replace(trial, pause_s=pause_s))


def judge_trial_step(turn: Turn, report: StepReport) -> None:
    """Measure a step of the new code, and accept the code or note its fault once the verdict is due."""
    trial = turn.code.trial
    if trial is None or trial.fault:
        return
    if turn.target.is_script:
        if report.step > trial.step:
            accept(turn)
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


def note_skipped_trial_step(turn: Turn, report: StepSkipped) -> None:
    """Note a fault of the new code if a step was skipped because its loss is not finite. A step that was skipped
    because the loss scale was too large is no fault."""
    trial = turn.code.trial
    if trial is not None and not trial.fault and report.loss is None:
        fault = f"the loss of step {report.step} is not finite"
        turn.code = replace(turn.code, update=replace(trial, fault=fault, keeps_steps=False))


def accept(turn: Turn) -> None:
    """Accept the new code. The workers with the code before are not needed any more: `worker_pool` ends them."""
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


def roll_back(turn: Turn, reason: str, *, keeps_steps: bool) -> None:
    """Roll back: the next group forms of workers with the code before. Without `keeps_steps`, it starts from the step
    at which the new code took over, if that state is still whole; otherwise from the newest state, which the new code
    has trained."""
    trial = turn.code.trial
    assert trial is not None
    refused = trial.version if turn.code.wanted == trial.version else ""
    turn.code = Code(current=trial.before, wanted=turn.code.wanted, refused=refused)
    step = turn.progress.step
    if not keeps_steps and not turn.target.is_script and _can_restore(turn, trial):
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
    """True if the state of the step at which the new code took over is still there. If so, the snapshots that the new
    code has made are not used any more. Its checkpoints need no such care: they are committed only once it is
    accepted."""
    known = turn.snapshots
    turn.snapshots = replace(known, discarded=Discarded(trial.generation, turn.group.generation))
    if memory_snapshots.restorable_step(turn.state) == trial.step:
        return True
    turn.snapshots = known
    return False
