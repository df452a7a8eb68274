"""step(state, event, now, plan) -> (state, commands): what an attempt does about each event. Pure; called by the
supervisor's executor, which hands over all events of a turn at once (`step_all`), and by tests.

    a worker of the group is lost: it died, hangs, cannot be interrupted, or a collective failed
      1 QUIESCE  fence generation g, interrupt every survivor, collect the reports of snapshots in memory
      2 PLAN     workers = survivors + standbys, up to the grant; the cheapest whole source of the state
      3 FORM     run(g+1) in the same processes
      4 RUN      the first completed step closes the incident

For a planned change (grow, shrink, drain) the group is asked to stop at the next step boundary instead. The next group
forms from the snapshot of that step in memory, so no step is lost. A pause ends all workers and their memory, so it
commits a durable checkpoint first.

What a turn means for the goodput ledger, which `step` has booked at its end:

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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import assert_never

from shoal_service.core import goodput
from shoal_service.core.attempt import (
    checkpoints,
    code_update,
    deadlines,
    forming,
    hangs,
    incidents,
    losses,
    memory_snapshots,
    outcome,
    reports,
    switching,
)
from shoal_service.core.attempt.messages import (
    CheckpointCommitted,
    CheckpointFound,
    ClockJumped,
    Command,
    CommitFailed,
    DeathDated,
    DeathExplained,
    Directed,
    Emit,
    Event,
    FindCheckpoint,
    InterruptAcknowledged,
    ModelsCompared,
    NodesAvoided,
    NodesSilent,
    ProgressReported,
    Reopened,
    ReportArrived,
    RunReturned,
    ShowIncident,
    SnapshotPartsReported,
    StorageAway,
    StorageUnusable,
    Tick,
    WorkerEvent,
    WorkerFailedToStart,
    WorkerLost,
    WorkerUnreachable,
    WorkerWarm,
    still_due,
)
from shoal_service.core.attempt.state import Attempt, Stage, Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.goodput import Category, Ledger
from shoal_service.core.layout_plan import PlanLayout
from shoal_workers.contract import EndReason, SavedPart, SnapshotCost, StepReport, WorkerReport

_STORAGE_ANSWERS = (CheckpointFound, CheckpointCommitted, CommitFailed, StorageAway, StorageUnusable)
"""Answers of the storage, which may start the next group. They are handled after what the workers have reported in the
same turn."""
_WORKER_ANSWERS = (RunReturned, InterruptAcknowledged, SnapshotPartsReported, ReportArrived, ModelsCompared)


def open_attempt(state: Attempt) -> tuple[Command, ...]:
    """The commands that set a new attempt in motion. If the attempt before was lost, its incident is open. That of a
    script begins in STARTING: no checkpoint is looked for."""
    search = (FindCheckpoint(expected=state.checkpoints.expected),) if state.stage is Stage.OPENING else ()
    if state.incident is None:
        return search
    return (Emit(incidents.make_opened_event(state.incident)), ShowIncident(state.incident), *search)


def step(state: Attempt, event: Event, now: float, plan: PlanLayout) -> tuple[Attempt, tuple[Command, ...]]:
    """Return the next state and the commands that follow from one event. An ended attempt stays as it is."""
    return step_all(state, (event,), now, plan)


def step_all(
    state: Attempt, events: Sequence[Event], now: float, plan: PlanLayout
) -> tuple[Attempt, tuple[Command, ...]]:
    """Do what `step` does, for all events of a turn.

    Events that have arrived together are one turn: they happen one after the other, and what follows from the state
    (deadlines, forming, switching, missing workers) is considered once, after the last one. So a thousand workers that
    leave a group cost a thousand small changes and not a thousand looks at a thousand workers.
    """
    if state.stage is Stage.ENDED:
        return state, ()
    turn = Turn(state, now, plan)
    events = sorted(events, key=lambda event: isinstance(event, _STORAGE_ANSWERS))
    for number, together in enumerate(_together(events)):
        if turn.stage is Stage.ENDED:
            break
        event = together[0]
        if isinstance(event, ClockJumped):  # the first event of its turn, so that no jump is taken for an absence
            turn = _moved(turn, event)
        before = turn.state
        if number == 0:
            deadlines.extend_after_suspend(turn, is_reopened=any(isinstance(event, Reopened) for event in events))
        if isinstance(event, ProgressReported):
            _progressed(turn, together)
        else:
            _happen(turn, event)
        if together[-1] is events[-1]:
            _follow(turn)
        turn.ledger = booked(before, turn.state, event, now)
    commands = turn.commands if len(events) == 1 else still_due(turn.commands, turn.state)
    return turn.state, tuple(commands)


def _together(events: Sequence[Event]) -> Iterator[tuple[Event, ...]]:
    """Split the events into those that are handled together: reports of progress that follow one another at once, all
    other events one by one."""
    for is_progress, group in groupby(events, key=lambda event: isinstance(event, ProgressReported)):
        run = tuple(group)
        yield from (run,) if is_progress else zip(run, strict=True)


def _moved(turn: Turn, jump: ClockJumped) -> Turn:
    after = Turn(deadlines.shift_times(turn.state, jump.by_s), turn.now, turn.plan)
    after.commands = turn.commands
    return after


def _progressed(turn: Turn, events: Iterable[Event]) -> None:
    progress = [(event.index, event.progress) for event in events if isinstance(event, ProgressReported)]
    for index, _ in progress:
        forming.note_answer(turn, index)
    hangs.keep_progress(turn, progress)


def _follow(turn: Turn) -> None:
    """Do what follows from the state and the time, whatever the events were."""
    for apply in (
        outcome.consider,
        deadlines.apply,
        outcome.consider,
        checkpoints.search_again,
        forming.consider,
        reports.note_long_run,
        code_update.consider,
        switching.consider,
        forming.replenish,
    ):
        if turn.stage is not Stage.ENDED:
            apply(turn)


def _happen(turn: Turn, event: Event) -> None:
    if isinstance(event, _WORKER_ANSWERS):
        forming.note_answer(turn, event.index)
    match event:
        case CheckpointFound():
            checkpoints.handle_found(turn, event)
        case StorageAway():
            checkpoints.handle_failed_search(turn, event)
        case StorageUnusable(message):
            turn.end(EndReason.STORAGE_FAILED, message)
        case DeathDated(worker_id, at):
            incidents.date_death(turn, worker_id, at)
        case DeathExplained(worker_id, message):
            losses.handle_explained_death(turn, worker_id, message)
        case SnapshotPartsReported(index, parts):
            memory_snapshots.keep_reported_parts(turn, index, parts)
        case ProgressReported():
            _progressed(turn, (event,))
        case ReportArrived(index, item):
            reports.handle_report(turn, index, item)
        case CheckpointCommitted(name, generation, committed_step):
            checkpoints.handle_commit(turn, name, generation, committed_step)
        case CommitFailed(name, generation, message):
            checkpoints.handle_failed_commit(turn, name, generation, message)
        case Directed():
            switching.obey(turn, event)
        case Reopened():
            memory_snapshots.ask_again(turn)
        case NodesAvoided(avoided):
            switching.avoid_nodes(turn, avoided)
        case NodesSilent(silent):
            losses.handle_silent_nodes(turn, silent)
        case Tick() | ClockJumped():
            pass  # deadlines are checked after every event
        case _:
            worker = turn.pool.worker(event.index)
            if worker is not None:  # else it is gone: what it has answered before does not matter any longer
                _happen_to_worker(turn, worker, event)


def _happen_to_worker(turn: Turn, worker: Worker, event: WorkerEvent) -> None:
    match event:
        case WorkerWarm(_, info):
            forming.handle_warm_worker(turn, worker, info)
        case WorkerFailedToStart(_, error):
            forming.handle_failed_start(turn, worker, error)
        case WorkerLost(_, cause, witness, message):
            losses.handle_lost_worker(turn, worker, cause, witness, message)
        case WorkerUnreachable():
            forming.note_unreachable(turn, worker)
        case RunReturned(_, worker_exit):
            losses.handle_exit(turn, worker, worker_exit)
        case InterruptAcknowledged(_, generation):
            losses.note_acknowledgement(turn, worker, generation)
        case ModelsCompared(_, difference):
            code_update.note_comparison(turn, worker, difference)
        case _:
            assert_never(event)


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
