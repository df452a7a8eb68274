"""4 PLAN, second half: what follows when all workers have left `run`: a commit, the next group, a back-off, an older
state, or the end.

`machine` calls `consider` when workers have left, and `consider_commit` in each turn. It never interrupts a worker, and
kills only those that the verdict blames.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import assert_never

from shoal_service.core.attempt import (
    code_update,
    deaths,
    forming,
    incidents,
    memory_snapshots,
    scripts,
    suspicion,
    verdict,
)
from shoal_service.core.attempt.commands import ForgetDamaged, KillWorker
from shoal_service.core.attempt.faults import FAULTS, Budget
from shoal_service.core.attempt.incidents import blame, with_more_steps
from shoal_service.core.attempt.state.attempt import LONG_S
from shoal_service.core.attempt.state.stages import Committing, FallingBack, Quiescing, Stage, Switching
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.attempt.verdict import Outcome
from shoal_service.core.desired import Desired
from shoal_service.core.events.training import (
    CheckpointDamaged,
    CheckpointRetried,
    NonFiniteStepRolledBack,
    SwitchLossy,
)
from shoal_service.core.events.workers import WorkerLost
from shoal_service.core.quantities import count_text, ranks_text
from shoal_workers.contract.backoff import backoff_s
from shoal_workers.contract.exception_causes import LAYOUT_REFUSED
from shoal_workers.contract.fault_tolerance import NonFinitePolicy
from shoal_workers.contract.job import EndReason, IncidentCause, UserFailure
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind, WorkerExit
from shoal_workers.contract.validation import is_exhausted, why_exhausted

_FRUITLESS_LIMIT = 6
_LAST_VALIDATIONS = 3
"""Number of tries of the final validation: what kills its worker three times will kill it again, and the model is
saved."""
_LAST_SAVES = 5
"""Number of tries to save the state after the last step, with 1, 2, 4 and 8 s between them: a short outage of the
storage must not cost a whole training run."""

_PACKAGE = re.compile(r"/\S*/_ray_pkg_[0-9a-f]+/")
"""Where Ray unpacks a job's code: in a traceback its paths begin at the directory of the code."""


def consider(turn: Turn) -> None:
    """Decide how the attempt continues, once no worker is in `run` any more."""
    decision = verdict.decide(turn.state, turn.now)
    if decision is None:
        return
    first = decision.exits[0] if decision.exits else None
    # first: an error that would end the job only ends the trial of new code
    if fault := code_update.fault_of_the_new_code(turn.state, decision):
        code_update.roll_back(turn, fault, keeps_steps=False)
        if turn.incident is None:
            forming.plan_next(turn)
        else:
            _re_form(turn)
        return
    match decision.outcome:
        case Outcome.USER_ERROR:
            failure = _failure_of(turn, decision.exits)
            if failure.mistake == LAYOUT_REFUSED and forming.proof_refused(turn, failure.message):
                forming.plan_next(turn)
                return
            if verdict.is_repeated(turn.state, decision.exits) and turn.target.is_script:
                failure = scripts.final(failure, f"{failure.sentence}, on {ranks_text(failure.ranks)}")
            message = scripts.with_early_ends(turn.state, decision.exits, failure.sentence)
            turn.end(EndReason.USER_ERROR, message, failure)
        case Outcome.ENGINE_ERROR | Outcome.EVERY_WORKER_FAILED:
            is_engine = decision.outcome is Outcome.ENGINE_ERROR
            message = f"{verdict.words_of_error(decision.exits[0])} ({decision.reason})"
            reason = EndReason.INTERNAL if is_engine else EndReason.WORKERS_FAILED
            turn.end(reason, message, _most_frequent(decision.exits))
        case Outcome.WORKERS_AT_FAULT:
            _replace_faulty(turn, decision.exits)
            consider(turn)  # the verdict on the workers that are left
        case Outcome.NON_FINITE:
            assert first is not None
            _not_finite(turn, first)
        case Outcome.DAMAGED_CHECKPOINT:
            assert first is not None
            if turn.group.restored is None:
                turn.end(EndReason.DAMAGED_CHECKPOINT, _origin_is_damaged(turn, first))
            else:
                _fall_back(turn, turn.group.restored, first)
        case Outcome.AS_PLANNED:
            _left_as_planned(turn, decision.exits)
        case Outcome.RESULT_NOT_SAVED:
            _save_again(turn, decision.reason)
        case Outcome.STORAGE_FAILED:
            turn.end(EndReason.STORAGE_FAILED, decision.reason)
        case Outcome.SNAPSHOTS_UNKNOWN:
            pass  # decided again with each report, and by `deadlines`
        case Outcome.LOST:
            if any(e.kind is ExitKind.SNAPSHOT_LOST for e in decision.exits):
                _exclude_source(turn)
            if turn.target.is_script and (repeated := scripts.repeated_end(turn)) is not None:
                turn.end(EndReason.USER_ERROR, repeated.message, repeated)
            else:
                _re_form(turn)
        case _:
            assert_never(decision.outcome)


def consider_commit(turn: Turn) -> None:
    """Continue once the checkpoint of the last step is committed, or has failed. Acts in COMMITTING only."""
    state = turn.state
    if state.stage is not Stage.COMMITTING:
        return
    last = next(iter(state.group.exits.values()))
    name = str(CheckpointName(last.step, state.config.attempt, state.group.generation))
    if verdict.is_durable(state, last.step):
        _go_on(turn, last.kind)
    elif name in state.checkpoints.failed:
        go_on_without_commit(turn, "the checkpoint of the last step could not be saved")
    elif any(
        state.pool.worker(index) is None and verdict.part_is_unreported(state, index) for index in state.group.workers
    ):
        _re_form(turn)


def go_on_without_commit(turn: Turn, message: str) -> None:
    """Continue although the state of the last step did not become durable. To finish would lose the model, so it is
    saved again; to switch may lose steps."""
    last = next(iter(turn.group.exits.values()))
    if last.kind is ExitKind.FINISHED:
        _save_again(turn, message)
        return
    turn.budgets = replace(turn.budgets, grow_not_before=turn.now + 60.0)
    _switch_from_best_source(turn, last, message)


def _save_again(turn: Turn, message: str) -> None:
    """Form a group once more to save the result: all steps are done, but it is not durable."""
    tries = turn.budgets.last_saves + 1
    if tries >= _LAST_SAVES or turn.target.desired is not Desired.RUN:
        turn.end(EndReason.STORAGE_FAILED, f"training finished, but its result is not durable: {message}")
        return
    back_off_s = backoff_s(tries, first_s=1.0)
    turn.budgets = replace(turn.budgets, last_saves=tries, form_not_before=turn.now + back_off_s)
    turn.emit(CheckpointRetried(message=message, number=tries, of=_LAST_SAVES - 1, after_s=back_off_s))
    forming.plan_next(turn)


def _not_finite(turn: Turn, worker_exit: WorkerExit) -> None:
    """Roll back and leave the step out if health.non_finite says so; end otherwise, or after too many rollbacks."""
    state, health = turn.state, turn.target.spec.health
    bad = worker_exit.step + 1
    detail = worker_exit.error.message if worker_exit.error else "loss or gradient norm is not finite"
    message = f"step {bad}: {detail}"
    if health.non_finite is not NonFinitePolicy.ROLL_BACK:
        turn.end(EndReason.NON_FINITE, message)
    elif state.budgets.rollbacks >= health.max_non_finite:
        turn.end(
            EndReason.NON_FINITE,
            f"{message}; rolled back {count_text(state.budgets.rollbacks, 'time')} already "
            f"(health.max_non_finite {health.max_non_finite})",
        )
    else:
        blame(turn, IncidentCause.NON_FINITE, f"rank {worker_exit.rank}", message, None)
        turn.budgets = replace(turn.budgets, rollbacks=turn.budgets.rollbacks + 1)
        turn.history = replace(turn.history, skip_steps=(*(s for s in turn.history.skip_steps if s != bad), bad))
        turn.emit(NonFiniteStepRolledBack(step=bad, to=state.checkpoints.durable_step, message=detail))
        _re_form(turn)


def _left_as_planned(turn: Turn, exits: tuple[WorkerExit, ...]) -> None:
    last = exits[0]
    if turn.target.is_script:
        is_done = all(worker_exit.kind is ExitKind.FINISHED for worker_exit in exits)
        _go_on(turn, ExitKind.FINISHED if is_done else ExitKind.YIELDED)
    elif last.kind is ExitKind.FINISHED or _was_durable(turn) or all(e.is_durable for e in exits):
        turn.enter(Committing(since=turn.now))
        consider_commit(turn)
    else:
        _switch_from_best_source(turn, last, f"the snapshot of step {last.step} is not whole in memory")


def _was_durable(turn: Turn) -> bool:
    """Whether the group was asked for a durable checkpoint of the step at which it stopped."""
    return isinstance(turn.current, (Switching, Quiescing)) and turn.current.durable


def _switch_from_best_source(turn: Turn, last: WorkerExit, message: str) -> None:
    """Form the next group from the newest state that is known. If that is older than the last step, steps are done
    again, and an event reports it."""
    best = memory_snapshots.best_source(turn.state)
    newest = best.step if best is not None else turn.checkpoints.durable_step
    if newest < last.step:
        turn.emit(SwitchLossy(message=message, restore=turn.checkpoints.newest, step=newest))
    forming.plan_next(turn)


def _replace_faulty(turn: Turn, exits: tuple[WorkerExit, ...]) -> None:
    """Kill the workers that raised what the others did not; the incident names them."""
    for index, worker_exit in [(i, e) for i, e in turn.group.exits.items() if e in exits]:
        cause, message = verdict.cause_of(worker_exit), verdict.words_of_error(worker_exit)
        blame(turn, cause, f"rank {worker_exit.rank}", message, turn.pool.worker(index))
        turn.do(KillWorker(index, message))
        worker = turn.drop_worker(index)
        turn.emit(WorkerLost(worker_id=worker.worker_id, rank=worker_exit.rank, cause=cause, message=message))
        memory_snapshots.note_lost_worker(turn, worker, cause)
        suspicion.worker_was_lost(turn, worker, cause)
    turn.health = replace(turn.health, raised=verdict.fault_of(exits, turn.health.raised))


def _exclude_source(turn: Turn) -> None:
    """Do not choose a snapshot again that could not be read although all its servers are alive. If a server was lost,
    the snapshot may still be whole with other servers; it is excluded after a second failure."""
    state = turn.state
    if state.group.source is None:
        return
    this = (state.group.source.generation, state.group.source.step)
    if memory_snapshots.is_served(state, state.group.source) or this in state.snapshots.doubtful:
        turn.snapshots = replace(turn.snapshots, unreadable=(*turn.snapshots.unreadable, this))
    else:
        turn.snapshots = replace(turn.snapshots, doubtful=(*turn.snapshots.doubtful, this))


def _replace_worker_that_hangs_again(turn: Turn) -> None:
    """Replace the worker that stood still first, if the group has hung twice at this step and all workers have reacted
    to the interrupt each time. It serves its snapshots until the next group runs."""
    state, hang = turn.state, turn.health.hang
    worker = state.pool.worker(hang.index) if hang is not None and hang.is_repeated else None
    if state.incident is None or state.incident.cause is not IncidentCause.HUNG or state.incident.ranks:
        return
    if worker is not None and worker.info is not None:
        rank = state.group.rank_of(worker.index)
        message = f"the group hung at step {state.progress.step} again, and rank {rank} stood still first"
        leave = AvoidedNode(node_id=worker.info.node_id, reason=message, deadline=turn.now)
        turn.pool = turn.pool.with_worker(replace(worker, leave=leave))
        blame(turn, IncidentCause.HUNG, "progress stamps", message, worker)


def _go_on(turn: Turn, kind: ExitKind) -> None:
    if kind is ExitKind.FINISHED and _has_another_end(turn):
        forming.plan_next(turn)
    elif kind is ExitKind.FINISHED:
        if turn.target.is_script:
            code_update.accept(turn)
        incidents.close_at_the_end(turn)
        turn.end(EndReason.FINISHED, _finished(turn))
    else:
        forming.plan_next(turn)


def _finished(turn: Turn) -> str:
    if turn.target.is_script:
        return scripts.words_of_the_end(turn.state)
    step, standing, rule = turn.progress.step, turn.history.standing, turn.target.spec.validation
    if standing is not None and is_exhausted(standing, rule) and step == standing.judged_step:
        return f"stopped early after {count_text(step, 'step')}: {why_exhausted(standing, rule)}"
    return f"finished after {count_text(step, 'step')}"


def _has_another_end(turn: Turn) -> bool:
    """Whether `stop` was changed while the group did its last step."""
    return turn.group.settings is not None and turn.group.settings.stop != turn.target.spec.stop


def _re_form(turn: Turn) -> None:
    """Form the next group, unless a budget is exceeded. All survivors have left `run`."""
    _replace_worker_that_hangs_again(turn)  # before the next group chooses its workers
    state = turn.state
    is_free = state.incident is not None and FAULTS[state.incident.cause].budget is Budget.NONE
    recoveries, fruitless = state.budgets.recoveries + (not is_free), state.budgets.fruitless + 1
    back_off_s = 0.0 if fruitless <= 2 else backoff_s(fruitless - 2, first_s=1.0, longest_s=30.0)
    turn.budgets = replace(
        turn.budgets, recoveries=recoveries, fruitless=fruitless, form_not_before=turn.now + back_off_s
    )
    if state.incident is not None:
        before = replace(state.incident.before, step=max(state.incident.before.step, state.progress.step))
        bound = state.incident.node_loss
        if bound is not None:
            bound = with_more_steps(bound, before.step - state.incident.before.step)
        turn.incident = replace(state.incident, quiesced_at=turn.now, before=before, node_loss=bound)
    last = deaths.last_words(state)
    limit = state.target.spec.retry.max_recoveries
    if fruitless >= _LAST_VALIDATIONS and state.is_finishing and verdict.is_durable(state, state.progress.step):
        turn.end(
            EndReason.VALIDATION_FAILED,
            f"{count_text(state.progress.step, 'step')} done and {state.checkpoints.newest} committed, but the final "
            f"validation was lost {count_text(fruitless, 'time')}; last: {last}. The model can be exported; set "
            "validation.samples to 0 to train without validation",
        )
    elif recoveries > limit:
        turn.end(
            EndReason.RECOVERY_BUDGET,
            f"recovered {count_text(state.budgets.recoveries, 'time')}, and retry.max_recoveries is "
            f"{limit}; last: {last}",
        )
    elif fruitless > _FRUITLESS_LIMIT:
        no_step = "completed no step"
        if state.target.is_script:
            no_step = f"reported no new step and ran for less than {LONG_S:g} s"
        turn.end(
            EndReason.RECOVERY_BUDGET,
            f"{_FRUITLESS_LIMIT} re-formations in a row {no_step}; last: {last}",
        )
    elif turn.budgets.setbacks > _FRUITLESS_LIMIT:
        turn.end(
            EndReason.RECOVERY_BUDGET,
            f"no step after {state.progress.furthest_step} is completed, and "
            f"{count_text(turn.budgets.setbacks, 'group')} had to "
            f"begin at an earlier step than the one before; last: {last}",
        )
    elif turn.checkpoints.must_search:
        turn.checkpoints = replace(turn.checkpoints, must_search=False)
        turn.enter(FallingBack(since=turn.now))
        turn.find_checkpoint()
    else:
        forming.plan_next(turn)


def _fall_back(turn: Turn, bad: str, worker_exit: WorkerExit) -> None:
    state = turn.state
    message = worker_exit.error.message if worker_exit.error else "verification failed"
    damaged = (*state.checkpoints.damaged, bad)
    newest = None if turn.checkpoints.newest == bad else turn.checkpoints.newest
    turn.checkpoints = replace(turn.checkpoints, damaged=damaged, newest=newest)
    turn.emit(CheckpointDamaged(name=bad, message=message))
    if state.incident is not None:
        turn.incident = replace(state.incident, quiesced_at=turn.now)
    if state.target.ends_saved:
        turn.end_saved()
        return
    turn.enter(FallingBack(since=turn.now))
    turn.do(ForgetDamaged(bad, message))
    turn.find_checkpoint()


def _origin_is_damaged(turn: Turn, worker_exit: WorkerExit) -> str:
    origin = turn.target.spec.continue_from
    assert origin is not None
    message = worker_exit.error.message if worker_exit.error else "verification failed"
    return (
        f"the checkpoint of job {origin.job} that this job goes on from cannot be used: {message} Submit the job again "
        f"from another one; `shoal checkpoints {origin.job}` lists them"
    )


def _failure_of(turn: Turn, exits: tuple[WorkerExit, ...]) -> UserFailure:
    """The error that ends the attempt. A script of which one rank raises makes the others raise a little later, so the
    first error is the cause, as torchrun has it; the ranks of a task report such errors as failed collectives."""
    if not turn.target.is_script:
        return _most_frequent(exits)
    first = min(exits, key=lambda e: e.at)
    return _most_frequent(tuple(e for e in exits if e.error is not None and _is_same(e, first)))


def _is_same(one: WorkerExit, other: WorkerExit) -> bool:
    errors = [(e.error.type, e.error.message) for e in (one, other) if e.error is not None]
    return len(errors) == 2 and errors[0] == errors[1]


def _most_frequent(exits: tuple[WorkerExit, ...]) -> UserFailure:
    """The error that most ranks have raised, with those ranks."""
    groups: dict[tuple[str, str], list[WorkerExit]] = {}
    for worker_exit in exits:
        if worker_exit.error is not None:
            groups.setdefault((worker_exit.error.type, worker_exit.error.message), []).append(worker_exit)
    largest = max(groups.values(), key=len)
    error = largest[0].error
    assert error is not None
    return UserFailure(
        type=error.type,
        message=error.message,
        traceback=_PACKAGE.sub("", error.traceback),
        phase=error.phase,
        ranks=tuple(sorted(e.rank for e in largest)),
        step=largest[0].step,
        mistake=error.mistake,
        line=error.line,
    )
