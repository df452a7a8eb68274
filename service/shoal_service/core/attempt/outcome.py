"""4 PLAN: how a group has ended, and what follows: a commit, the next group, a back-off, an older state, or the end.

`consider` asks `decide(state, now) -> Next` once no worker is in `run`, and `apply` carries the answer out. `decide`
is pure. Nothing here interrupts a worker; those that an exit blames are killed.

Workers report the class and the origin of their own exceptions (`contract.exception_causes`); only here are the
ranks compared:

    exception                        on some ranks                     on every rank, or again (see below)
    of the task's code               the task                          the task
    device, memory, system           these workers: they are replaced  in the task's code: the task
                                     and their nodes are suspected     elsewhere: the job ends as workers_failed
    of the engine's code             these workers: they are replaced  Shoal: the job ends as internal

A single rank is "some ranks". A fault that comes at the same step after a worker was replaced for it twice is not that
worker's: it counts as one on every rank. A fault of the device or of NCCL is the same only on the same rank or node,
since in a large job several nodes fail at one step by chance. What differs for a script is in `scripts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from shoal_service.core.attempt import checkpoints, code_update, forming, incidents, losses, memory_snapshots
from shoal_service.core.attempt.faults import FAULTS, Budget
from shoal_service.core.attempt.scripts import find_rules, most_frequent
from shoal_service.core.attempt.state import (
    Attempt,
    AvoidedNode,
    Committing,
    Crash,
    FallingBack,
    Quiescing,
    RaisedFault,
    Stage,
    Switching,
)
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.desired import Desired
from shoal_service.core.events import CheckpointRetried, NonFiniteStepRolledBack, SwitchLossy
from shoal_service.core.quantities import count_text
from shoal_workers.contract import (
    LAYOUT_REFUSED,
    CheckpointName,
    EndReason,
    ErrorClass,
    ErrorReport,
    ExitKind,
    IncidentCause,
    NonFinitePolicy,
    Origin,
    UserFailure,
    WorkerExit,
    backoff_s,
)

_FRUITLESS_LIMIT = 6
_FRUITLESS_STORAGE_LIMIT = 3
_LAST_VALIDATIONS = 3
"""Number of tries of the final validation: what kills its worker three times will kill it again, and the model is
saved."""
_LAST_SAVES = 5
"""Number of tries to save the state after the last step, with 1, 2, 4 and 8 s between them: a short outage of the
storage must not cost a whole training run."""
_REPLACEMENTS = 2
"""How often in a row workers are replaced for the same fault at the same step."""
_CAUSES = {
    ExitKind.WORKER_FAULT: IncidentCause.WORKER_FAULT,
    ExitKind.ENGINE_ERROR: IncidentCause.ENGINE_ERROR,
}
_FAILED: dict[ErrorClass, str] = {
    ErrorClass.PLAIN: "Shoal's own code failed",
    ErrorClass.DEVICE: "the GPU failed",
    ErrorClass.DEVICE_MEMORY: "the GPU is out of memory",
    ErrorClass.HOST_MEMORY: "the node is out of memory",
    ErrorClass.NETWORK: "NCCL failed",
    ErrorClass.SYSTEM: "the operating system failed",
}
_NOT_OF_CODE = (
    IncidentCause.NODE_DIED,
    IncidentCause.NODE_UNREACHABLE,
    IncidentCause.UNREACHABLE,
    IncidentCause.PREEMPTED,
    IncidentCause.CORRUPTED,
    IncidentCause.SNAPSHOT_LOST,
    IncidentCause.DAMAGED_CHECKPOINT,
)
"""Causes of incidents that say nothing against new code."""


def consider(turn: Turn) -> None:
    """Continue the attempt once no worker is in `run` any more, or the checkpoint of the last step is committed."""
    following = decide(turn.state, turn.now)
    if following is not None:
        apply(turn, following)


def commit_overdue(turn: Turn, message: str) -> None:
    """Continue although the state of the last step did not become durable in time."""
    apply(turn, _without_commit(turn.state, message))


# What follows: the answers of `decide`


@dataclass(frozen=True, slots=True)
class End:
    reason: EndReason
    message: str
    failure: UserFailure | None = None


@dataclass(frozen=True, slots=True)
class ReplaceFaulty:
    """Some workers are at fault, and are replaced before anything else is decided."""

    exits: tuple[WorkerExit, ...]


@dataclass(frozen=True, slots=True)
class RollBackCode:
    """The new code that is on trial has ended the group."""

    fault: str


@dataclass(frozen=True, slots=True)
class RefuseLayout:
    """The group has refused its layout; another one is tried, or the attempt ends."""

    failure: UserFailure


@dataclass(frozen=True, slots=True)
class LeaveOutStep:
    """Roll back and leave out a step that is not finite."""

    step: int
    rank: int
    message: str


@dataclass(frozen=True, slots=True)
class FallBack:
    """The checkpoint that the group has read is damaged."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class AwaitStorage:
    """A rank cannot read the storage of the checkpoint that the group restores."""

    message: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Wait for the durable checkpoint of the step at which the group has stopped."""


@dataclass(frozen=True, slots=True)
class FormNext:
    lossy: SwitchLossy | None = None
    """Reports that steps are done again; None if the next group goes on from the last step."""
    delays_growth: bool = False


@dataclass(frozen=True, slots=True)
class SaveAgain:
    """Form a group once more to save the result: all steps are done, but it is not durable."""

    message: str


@dataclass(frozen=True, slots=True)
class ReForm:
    """The group is lost, and the next one forms unless a budget is exceeded."""

    program_end: Crash | None = None
    """New value of `health.program_end`."""


Next = (
    End
    | ReplaceFaulty
    | RollBackCode
    | RefuseLayout
    | LeaveOutStep
    | FallBack
    | AwaitStorage
    | Commit
    | FormNext
    | SaveAgain
    | ReForm
)


def decide(state: Attempt, now: float) -> Next | None:
    """Decide what follows. None while a worker is in `run`, or what is waited for may still come."""
    if state.stage is Stage.COMMITTING:
        return _after_commit(state)
    if not state.group_active or not state.all_left:
        return None
    exits, rules = tuple(state.group.exits.values()), find_rules(state)
    by_kind = {kind: tuple(e for e in exits if e.kind is kind) for kind in ExitKind}
    raised = rules.raised(state)
    if errors := tuple(e for e in raised if e.kind is ExitKind.USER_ERROR):
        return _after_user_error(state, errors)
    for kind in _CAUSES:
        if faults := tuple(e for e in raised if e.kind is kind):
            return _after_faults(state, faults)
    if bad := by_kind[ExitKind.NON_FINITE]:
        return _after_non_finite_step(state, bad[0])
    if (damaged := by_kind[ExitKind.DAMAGED_CHECKPOINT]) and (state.group.restored or state.checkpoints.origin):
        return _after_damaged_checkpoint(state, damaged[0])
    is_complete = len(exits) == len(state.group.workers)
    if is_complete and all(e.is_planned for e in exits) and rules.left_together(exits):
        return _after_planned_stop(state, exits)
    if storage := by_kind[ExitKind.STORAGE_FAILED]:
        reason = storage[0].error.message if storage[0].error else "storage failed"
        if checkpoints.reads_storage(state):
            return AwaitStorage(f"rank {storage[0].rank}: {reason}")
        if storage[0].step == state.history.total_steps:
            return _save_again(state, reason)
        if state.budgets.fruitless >= _FRUITLESS_STORAGE_LIMIT:
            return End(EndReason.STORAGE_FAILED, reason)
    if memory_snapshots.are_awaited(state, now):
        return None  # decided again with each report, and when the time for them is over
    return _after_loss(state, exits)


def _after_user_error(state: Attempt, errors: tuple[WorkerExit, ...]) -> Next:
    if state.code.trial is not None:  # an error that would end the job only ends the trial of new code
        return RollBackCode(_error(errors[0]).sentence)
    rules = find_rules(state)
    failure = rules.failure(errors)
    if failure.mistake == LAYOUT_REFUSED:
        return RefuseLayout(failure)
    message, failure = rules.end_by_error(state, errors, is_repeated=_is_repeated(state, errors))
    return End(EndReason.USER_ERROR, message, failure)


def _after_faults(state: Attempt, faults: tuple[WorkerExit, ...]) -> Next:
    """Replace the workers at fault, unless the fault is everywhere or comes again and again."""
    num_ranks, first = len(state.group.workers), faults[0]
    if len(faults) == num_ranks > 1 and len({_error(e).error_class for e in faults}) == 1:
        reason = f"on all {count_text(num_ranks, 'rank')}"
    elif _is_repeated(state, faults):
        reason = f"for the third time at step {first.step + 1}, after its workers were replaced"
    else:
        return ReplaceFaulty(faults)
    is_engine = first.kind is ExitKind.ENGINE_ERROR
    if state.code.trial is not None or (not is_engine and all(_error(e).origin is Origin.TASK for e in faults)):
        return _after_user_error(state, faults)
    end_reason = EndReason.INTERNAL if is_engine else EndReason.WORKERS_FAILED
    return End(end_reason, f"{_describe_error(first)} ({reason})", most_frequent(faults))


def _after_non_finite_step(state: Attempt, worker_exit: WorkerExit) -> Next:
    """Leave the step out if health.non_finite says so; end otherwise, or after too many rollbacks."""
    health, rollbacks, step = state.target.spec.health, state.budgets.rollbacks, worker_exit.step + 1
    error, fault = worker_exit.error, f"step {step} is not finite"
    if state.code.trial is not None:
        return RollBackCode(f"{fault}: {error.sentence if error is not None else fault}")
    detail = error.message if error is not None else "loss or gradient norm is not finite"
    message = f"step {step}: {detail}"
    if health.non_finite is not NonFinitePolicy.ROLL_BACK:
        return End(EndReason.NON_FINITE, message)
    if rollbacks >= health.max_non_finite:
        already = f"rolled back {count_text(rollbacks, 'time')} already (health.max_non_finite {health.max_non_finite})"
        return End(EndReason.NON_FINITE, f"{message}; {already}")
    return LeaveOutStep(step, worker_exit.rank, detail)


def _after_loss(state: Attempt, exits: tuple[WorkerExit, ...]) -> Next:
    """Form the group again. What its survivors hold is known."""
    incident, is_of_memory = state.incident, any(e.kind is ExitKind.SNAPSHOT_LOST for e in exits)
    is_on_trial = state.code.trial is not None and not is_of_memory
    if is_on_trial and incident is not None and incident.cause not in _NOT_OF_CODE:
        return RollBackCode(f"{incident.cause}: {incident.message}")
    program_end, failure = find_rules(state).count_end(state)
    return End(EndReason.USER_ERROR, failure.message, failure) if failure else ReForm(program_end)


def _after_damaged_checkpoint(state: Attempt, worker_exit: WorkerExit) -> Next:
    message = worker_exit.error.message if worker_exit.error else "verification failed"
    if state.group.restored is not None:
        return FallBack(state.group.restored, message)
    origin = state.target.spec.continue_from
    assert origin is not None
    return End(
        EndReason.DAMAGED_CHECKPOINT,
        f"the checkpoint of job {origin.job} that this job goes on from cannot be used: {message} Submit the job again "
        f"from another one; `shoal checkpoints {origin.job}` lists them",
    )


def _after_planned_stop(state: Attempt, exits: tuple[WorkerExit, ...]) -> Next:
    last, current = exits[0], state.current
    was_durable = isinstance(current, (Switching, Quiescing)) and current.durable
    if state.target.is_script:
        is_done = all(worker_exit.kind is ExitKind.FINISHED for worker_exit in exits)
        return _finish(state) if is_done else FormNext()
    if last.kind is ExitKind.FINISHED or was_durable or all(e.is_durable for e in exits):
        return Commit()
    return _form_from_best_source(state, last, f"the snapshot of step {last.step} is not whole in memory")


def _after_commit(state: Attempt) -> Next | None:
    last = next(iter(state.group.exits.values()))
    name = str(CheckpointName(last.step, state.config.attempt, state.group.generation))
    if state.checkpoints.is_durable(last.step):
        return _finish(state) if last.kind is ExitKind.FINISHED else FormNext()
    if name in state.checkpoints.failed:
        return _without_commit(state, "the checkpoint of the last step could not be saved")
    lost = (index for index in state.group.workers if state.pool.worker(index) is None)
    return ReForm() if any(checkpoints.is_part_missing(state, index) for index in lost) else None


def _without_commit(state: Attempt, message: str) -> Next:
    """The state of the last step is not durable. To finish would lose the model, so it is saved again; to switch may
    lose steps."""
    last = next(iter(state.group.exits.values()))
    if last.kind is ExitKind.FINISHED:
        return _save_again(state, message)
    return replace(_form_from_best_source(state, last, message), delays_growth=True)


def _finish(state: Attempt) -> Next:
    """All steps are done, unless `stop` was changed while the group did its last step."""
    if state.group.settings is not None and state.group.settings.stop != state.target.spec.stop:
        return FormNext()
    return End(EndReason.FINISHED, find_rules(state).describe_finish(state))


def _save_again(state: Attempt, message: str) -> Next:
    if state.budgets.last_saves + 1 >= _LAST_SAVES or state.target.desired is not Desired.RUN:
        return End(EndReason.STORAGE_FAILED, f"training finished, but its result is not durable: {message}")
    return SaveAgain(message)


def _form_from_best_source(state: Attempt, last: WorkerExit, message: str) -> FormNext:
    """Form the next group from the newest state that is known. If that is older than the last step, steps are done
    again, and an event reports it."""
    newest = memory_snapshots.restorable_step(state)
    is_lossy = newest < last.step
    return FormNext(SwitchLossy(message=message, restore=state.checkpoints.newest, step=newest) if is_lossy else None)


def _is_repeated(state: Attempt, faults: tuple[WorkerExit, ...]) -> bool:
    """True if workers were replaced for this fault before, as often as that is done."""
    return faults[0].kind in _CAUSES and _count_fault(state, faults).times > _REPLACEMENTS


def _count_fault(state: Attempt, exits: tuple[WorkerExit, ...]) -> RaisedFault:
    """Return the fault that is remembered once the workers of these exits are replaced."""
    last, error_class = state.health.raised, _error(exits[0]).error_class
    ranks = sorted(e.rank for e in exits)
    fault = RaisedFault(
        step=max(e.step for e in exits),
        kind=exits[0].kind,
        error_class=error_class,
        places=(*ranks, *dict.fromkeys(state.group.nodes[rank] for rank in ranks)),
    )
    return replace(fault, times=last.times + 1) if last is not None and last.is_like(fault) else fault


def _describe_error(worker_exit: WorkerExit) -> str:
    error = _error(worker_exit)
    return f"{_FAILED[error.error_class]} on rank {worker_exit.rank}: {error.type}: {error.message}"


def _error(worker_exit: WorkerExit) -> ErrorReport:
    assert worker_exit.error is not None
    return worker_exit.error


# What is done


def apply(turn: Turn, following: Next) -> None:
    """Carry out what was decided."""
    match following:
        case End(reason, message, failure):
            if reason is EndReason.FINISHED:
                if turn.target.is_script:
                    code_update.accept(turn)
                incidents.close_at_the_end(turn)
            turn.end(reason, message, failure)
        case ReplaceFaulty(exits):
            fault = _count_fault(turn.state, exits)
            for index, worker_exit in [(i, e) for i, e in turn.group.exits.items() if e in exits]:
                cause, witness = _CAUSES[worker_exit.kind], f"rank {worker_exit.rank}"
                losses.replace_faulty(turn, index, cause, witness, _describe_error(worker_exit))
            turn.health = replace(turn.health, raised=fault)
            consider(turn)  # what follows from the exits that are left
        case RollBackCode(fault):
            code_update.roll_back(turn, fault, keeps_steps=False)
            if turn.incident is None:
                forming.plan_next(turn)
            else:
                _re_form(turn)
        case RefuseLayout(failure):
            if forming.note_refused_layout(turn, failure.message):
                forming.plan_next(turn)
            else:
                turn.end(EndReason.USER_ERROR, failure.sentence, failure)
        case LeaveOutStep(step, rank, detail):
            incidents.blame(turn, IncidentCause.NON_FINITE, f"rank {rank}", f"step {step}: {detail}", None)
            turn.budgets = replace(turn.budgets, rollbacks=turn.budgets.rollbacks + 1)
            skipped = tuple(skipped for skipped in turn.history.skip_steps if skipped != step)
            turn.history = replace(turn.history, skip_steps=(*skipped, step))
            turn.emit(NonFiniteStepRolledBack(step=step, to=turn.checkpoints.durable_step, message=detail))
            _re_form(turn)
        case FallBack(name, message):
            checkpoints.forget_damaged(turn, name, message)
            if not _end_if_saved(turn):
                _search_older(turn)
        case AwaitStorage(message):
            if not _end_if_saved(turn):
                checkpoints.await_readable(turn, message)
        case Commit():
            turn.enter(Committing(since=turn.now))
            consider(turn)
        case FormNext(lossy, delays_growth):
            if delays_growth:
                turn.budgets = replace(turn.budgets, grow_not_before=turn.now + 60.0)
            if lossy is not None:
                turn.emit(lossy)
            forming.plan_next(turn)
        case SaveAgain(message):
            tries = turn.budgets.last_saves + 1
            back_off_s = backoff_s(tries, first_s=1.0)
            turn.budgets = replace(turn.budgets, last_saves=tries, form_not_before=turn.now + back_off_s)
            turn.emit(CheckpointRetried(message=message, number=tries, of=_LAST_SAVES - 1, after_s=back_off_s))
            forming.plan_next(turn)
        case ReForm(program_end):
            if any(e.kind is ExitKind.SNAPSHOT_LOST for e in turn.group.exits.values()):
                memory_snapshots.exclude_source(turn)
            turn.health = replace(turn.health, program_end=program_end)
            _re_form(turn)
        case _:
            assert_never(following)


def _re_form(turn: Turn) -> None:
    """Form the next group, unless a budget is exceeded. All survivors have left `run`."""
    _replace_worker_that_hangs_again(turn)  # before the next group chooses its workers
    incident, budgets = turn.incident, turn.budgets
    is_free = incident is not None and FAULTS[incident.cause].budget is Budget.NONE
    fruitless = budgets.fruitless + 1
    back_off_s = 0.0 if fruitless <= 2 else backoff_s(fruitless - 2, first_s=1.0, longest_s=30.0)
    charged = budgets if is_free else budgets.recovered(turn.now)
    turn.budgets = replace(charged, fruitless=fruitless, form_not_before=turn.now + back_off_s)
    if incident is not None:
        turn.incident = incidents.note_quiesced(incident, turn.progress.step, turn.now)
    if end := _exceeded_budget(turn.state, is_free=is_free):
        turn.end(end.reason, end.message)
    elif turn.checkpoints.must_search:
        turn.checkpoints = replace(turn.checkpoints, must_search=False)
        _search_older(turn)
    else:
        forming.plan_next(turn)


def _exceeded_budget(state: Attempt, *, is_free: bool) -> End | None:
    """Return the end of an attempt that has exceeded a budget with its last loss, which is counted already."""
    budgets, limit, last = state.budgets, state.target.spec.retry.max_recoveries, losses.describe_last_loss(state)
    is_saved = state.is_finishing and state.checkpoints.is_durable(state.progress.step)
    if is_saved and budgets.fruitless >= _LAST_VALIDATIONS:
        return End(
            EndReason.VALIDATION_FAILED,
            f"{count_text(state.progress.step, 'step')} done and {state.checkpoints.newest} committed, but the final "
            f"validation was lost {count_text(budgets.fruitless, 'time')}; last: {last}. The model can be exported; "
            "set validation.samples to 0 to train without validation",
        )
    if budgets.recoveries > limit:
        recoveries = count_text(budgets.recoveries - (not is_free), "time")
        message = f"recovered {recoveries} within a day, and retry.max_recoveries is {limit}; last: {last}"
    elif budgets.fruitless > _FRUITLESS_LIMIT:
        message = f"{_FRUITLESS_LIMIT} re-formations in a row {find_rules(state).no_progress}; last: {last}"
    elif budgets.setbacks > _FRUITLESS_LIMIT:
        message = (
            f"no step after {state.progress.furthest_step} is completed, and {count_text(budgets.setbacks, 'group')} "
            f"had to begin at an earlier step than the one before; last: {last}"
        )
    else:
        return None
    return End(EndReason.RECOVERY_BUDGET, message)


def _replace_worker_that_hangs_again(turn: Turn) -> None:
    """Replace the worker that stood still first, if the group has hung twice at this step and all workers have reacted
    to the interrupt each time. It serves its snapshots until the next group runs."""
    hang, incident = turn.health.hang, turn.incident
    worker = turn.pool.worker(hang.index) if hang is not None and hang.is_repeated else None
    is_unnamed = incident is not None and incident.cause is IncidentCause.HUNG and not incident.ranks
    if is_unnamed and worker is not None and worker.info is not None:
        rank = turn.group.rank_of(worker.index)
        message = f"the group hung at step {turn.progress.step} again, and rank {rank} stood still first"
        leave = AvoidedNode(node_id=worker.node_id, reason=message, deadline=turn.now)
        turn.pool = turn.pool.with_worker(replace(worker, leave=leave))
        incidents.blame(turn, IncidentCause.HUNG, "progress stamps", message, worker)


def _end_if_saved(turn: Turn) -> bool:
    """Note that all workers have left `run`, and end the attempt if it must. Return True if it has ended."""
    if turn.incident is not None:
        turn.incident = replace(turn.incident, quiesced_at=turn.now)
    if turn.target.saves_and_ends:
        turn.end_after_save()
    return turn.stage is Stage.ENDED


def _search_older(turn: Turn) -> None:
    turn.enter(FallingBack(since=turn.now))
    turn.find_checkpoint()
