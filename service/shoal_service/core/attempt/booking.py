"""What each turn of the attempt machine means for the goodput ledger. Pure; `machine.step` calls `booked` at its end.

    stage before the turn                                     the time since the last turn goes to
    ------------------------------------------------------    -----------------------------------------------------
    running, switching                                        productive (its workers) and degraded (missing ones)
    anything else, an incident is open                        recovering, by its cause
    opening, starting; forming for the first time             starting
    committing after the last step                            checkpoint_stall
    committing, forming again, falling back                   resizing
    waiting, quiescing                                        idle: no fault, and no group can form yet

A script's time is productive if it reports no steps. If it does, the time of each group until its first report goes
to where the time before the group went.

The machine never looks at the ledger.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core import goodput
from shoal_service.core.attempt.events import Event, ReportArrived
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.goodput import Category, Ledger
from shoal_workers.contract.worker_reports import SavedPart, SnapshotCost, StepReport, WorkerReport

_QUIET_S = 5.0
"""Seconds between two bookings while nothing changes: the status of a waiting job must not change with every tick."""


def booked(before: Attempt, after: Attempt, event: Event, now: float) -> Ledger:
    """The ledger after one turn, which took the attempt from `before` to `after`."""
    ledger = before.ledger
    if _is_quiet(before, after, event) and ledger.at is not None and now - ledger.at < _QUIET_S:
        return ledger
    requested = before.target.spec.elasticity.max_workers
    workers = min(requested, len(before.group.workers))
    ledger = goodput.account(ledger, _find_account(before), requested=requested, in_group=workers, now=now)
    if isinstance(event, ReportArrived) and _is_from_group(before, event):
        if before.target.is_script:
            ledger = _script_reported(ledger, event.item, before, after)
        else:
            ledger = _reported(ledger, event.item, workers)
    return _moved_on(ledger, before, after)


def _is_quiet(before: Attempt, after: Attempt, event: Event) -> bool:
    """True if the time after this turn goes to the same account as the time before it."""
    return (
        not isinstance(event, ReportArrived)
        and after.stage is before.stage
        and after.incident == before.incident
        and after.target.spec.elasticity == before.target.spec.elasticity
    )


def _find_account(state: Attempt) -> str:
    match state.stage:
        case Stage.RUNNING | Stage.SWITCHING:
            return Category.PRODUCTIVE
        case _ if state.incident is not None:
            return goodput.recovering(state.incident.cause)
        case Stage.COMMITTING if state.is_finishing:
            return Category.CHECKPOINT_STALL
        case Stage.FORMING | Stage.COMMITTING | Stage.FALLING_BACK if state.history.has_formed:
            return Category.RESIZING
        case Stage.WAITING | Stage.QUIESCING if state.history.has_formed:
            return Category.IDLE
        case _:
            return Category.STARTING


def _is_from_group(state: Attempt, event: ReportArrived) -> bool:
    return event.item.generation == state.group.generation and event.index in state.group.ranks


def _reported(ledger: Ledger, item: WorkerReport, workers: int) -> Ledger:
    match item:
        case StepReport():
            return goodput.settle_step(
                ledger, generation=item.generation, step=item.step, step_s=item.step_s, workers=workers
            )
        case SavedPart():
            return goodput.checkpoint_stalled(ledger, step=item.step, stall_s=item.stall_s, workers=workers)
        case SnapshotCost():
            return goodput.snapshots_cost(ledger, copy_s=item.copy_s, every_steps=item.every_steps)
        case _:
            return ledger


def _script_reported(ledger: Ledger, item: WorkerReport, before: Attempt, after: Attempt) -> Ledger:
    if not isinstance(item, StepReport):
        return ledger
    if before.group.is_start_known:
        return goodput.settle_report(ledger, generation=item.generation, step=item.step)
    ledger = goodput.begun(ledger, _restart_account(before), start_step=after.group.start_step)
    return replace(ledger, settled_step=item.step, max_step=max(ledger.max_step, item.step))


def _restart_account(before: Attempt) -> str:
    """The account of the time that a script needs until its first step in a group."""
    if before.incident is not None:
        return goodput.recovering(before.incident.cause)
    return Category.RESIZING if before.progress.step_times else Category.STARTING


def _moved_on(ledger: Ledger, before: Attempt, after: Attempt) -> Ledger:
    """Move booked seconds to another account, if the turn has changed the stage or the incident."""
    if before.incident is not None and after.incident is not None and before.incident.cause != after.incident.cause:
        ledger = goodput.rename_incident(ledger, before.incident.cause, after.incident.cause)
    if _is_training(before) and not _is_training(after):
        if after.target.is_script and (after.is_finishing or not after.has_reported):
            ledger = goodput.keep(ledger)
        else:
            ledger = goodput.discard(ledger, _rest_account(after))
    if not _is_training(before) and _is_training(after):
        ledger = goodput.group_formed(ledger, generation=after.group.generation, start_step=after.group.start_step)
    if before.incident is not None and after.incident is None:
        ledger = goodput.close_incident(ledger)
    return ledger


def _rest_account(after: Attempt) -> str:
    """The account of the time since the last completed step of a group that has ended."""
    if after.incident is not None:
        return goodput.recovering(after.incident.cause)
    if after.is_finishing:
        return Category.CHECKPOINT_STALL
    if after.stage in (Stage.COMMITTING, Stage.FORMING, Stage.WAITING):
        return Category.RESIZING
    return Category.IDLE


def _is_training(state: Attempt) -> bool:
    return state.stage in (Stage.RUNNING, Stage.SWITCHING)
