"""step(state, event, now, plan) -> (state, commands): what an attempt does about each event. Pure; called by the
supervisor's executor and by tests.

    a worker of the group is lost: it died, hangs, cannot be interrupted, or a collective failed
      1 QUIESCE  fence generation g, interrupt every survivor, collect the reports of snapshots in memory
      2 PLAN     workers = survivors + warm spares, up to the grant; the cheapest whole source of the state
      3 FORM     run(g+1) in the same processes
      4 RUN      the first completed step closes the incident

For a planned change (grow, shrink, drain) the group is asked to stop at the next step boundary instead. The next group
forms from the snapshot of that step in memory, so no step is lost. A pause ends all workers and their memory, so it
commits a durable checkpoint first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from shoal_service.core.attempt import booking, deadlines, reports, worker_pool
from shoal_service.core.attempt.commands import (
    Command,
    Commit,
    FindCheckpoint,
    Interrupt,
    RequestSnapshotParts,
    RequestYield,
)
from shoal_service.core.attempt.events import (
    CheckpointCommitted,
    CheckpointFound,
    CommitFailed,
    DeathDated,
    DesiredChanged,
    ElasticityChanged,
    Event,
    GrantChanged,
    InterruptAcknowledged,
    NodesAvoided,
    ParallelismChanged,
    ProgressReported,
    ReportArrived,
    RunReturned,
    SnapshotPartsReported,
    StorageUnusable,
    Tick,
    WorkerFailedToStart,
    WorkerLost,
    WorkerUnreachable,
    WorkerWarm,
)
from shoal_service.core.attempt.faults import blame, hangs
from shoal_service.core.attempt.group import exits, follow_up, forming, snapshot_reports, switching
from shoal_service.core.attempt.plan_layout import PlanLayout
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import FallingBack, Opening, Quiescing, Stage, Starting, Switching
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.desired import Desired
from shoal_service.core.events.checkpoints import CheckpointFallback
from shoal_workers.contract.job import EndReason


def open_attempt() -> tuple[Command, ...]:
    """The commands that set a new attempt in motion."""
    return (FindCheckpoint(),)


def reopen(state: Attempt) -> tuple[Command, ...]:
    """The requests without an answer, sent again after the supervisor was restarted. Each of them can be repeated
    without harm. An ended attempt has none: what it has to store is durable by then."""
    if state.stage is Stage.ENDED:
        return ()
    commits: tuple[Command, ...] = tuple(
        Commit(name, tuple(parts[rank] for rank in sorted(parts)))
        for name, parts in state.checkpoints.parts.items()
        if name in state.checkpoints.committing
    )
    requests: tuple[Command, ...] = (
        *commits,
        *(RequestSnapshotParts(index) for index in state.snapshots.requested if state.pool.worker(index) is not None),
    )
    match state.current:
        case Opening() | FallingBack():
            return (*requests, FindCheckpoint(excluding=state.checkpoints.damaged))
        case Quiescing(interrupted_at=float()):
            return (*requests, *(Interrupt(index, state.group.generation) for index in state.in_run))
        case Switching(durable=durable):
            return (*requests, *(RequestYield(index, state.group.generation, durable) for index in state.in_run))
        case _:
            return requests


def step(state: Attempt, event: Event, now: float, plan: PlanLayout) -> tuple[Attempt, tuple[Command, ...]]:
    """The next state, and what to do about it. An ended attempt stays as it is."""
    if state.stage is Stage.ENDED:
        return state, ()
    turn = Turn(state, now, plan)
    deadlines.forgive_absence(turn)
    _happen(turn, event)
    for apply in (deadlines.apply, forming.consider, switching.consider, worker_pool.replenish):
        if turn.stage is not Stage.ENDED:
            apply(turn)
    turn.ledger = booking.booked(state, turn.state, event, now)
    return turn.state, tuple(turn.commands)


def _happen(turn: Turn, event: Event) -> None:
    match event:
        case CheckpointFound(name):
            _checkpoint_found(turn, name)
        case StorageUnusable(message):
            turn.end(EndReason.STORAGE_FAILED, message)
        case WorkerWarm(index, info):
            worker_pool.warm(turn, index, info)
        case WorkerFailedToStart(index, error):
            worker_pool.failed_to_start(turn, index, error)
        case WorkerLost(index, cause, witness, message):
            exits.worker_lost(turn, index, cause, witness, message)
        case DeathDated(worker_id, at):
            blame.date_death(turn, worker_id, at)
        case WorkerUnreachable(index):
            worker_pool.unreachable(turn, index)
        case RunReturned(index, worker_exit):
            worker_pool.answered(turn, index)
            exits.run_returned(turn, index, worker_exit)
        case InterruptAcknowledged(index, generation):
            worker_pool.answered(turn, index)
            exits.interrupt_acknowledged(turn, index, generation)
        case SnapshotPartsReported(index, held):
            worker_pool.answered(turn, index)
            snapshot_reports.reported(turn, index, held)
            follow_up.follow_when_all_left(turn)
        case ProgressReported(index, progress):
            worker_pool.answered(turn, index)
            hangs.progress_reported(turn, index, progress)
        case ReportArrived(index, item):
            worker_pool.answered(turn, index)
            reports.arrived(turn, index, item)
        case CheckpointCommitted(name, generation, committed_step):
            reports.committed(turn, name, generation, committed_step)
        case CommitFailed(name, generation, message):
            reports.commit_failed(turn, name, generation, message)
        case GrantChanged(workers):
            turn.target = replace(turn.target, granted=workers)
        case ElasticityChanged(elasticity):
            turn.target = turn.target.with_elasticity(elasticity)
        case ParallelismChanged(parallelism):
            turn.target = turn.target.with_parallelism(parallelism)
        case DesiredChanged(desired):
            _desired(turn, desired)
        case NodesAvoided(avoided):
            _avoid(turn, avoided)
        case Tick():
            pass  # deadlines are checked after every event
        case _:
            assert_never(event)


def _avoid(turn: Turn, avoided: tuple[AvoidedNode, ...]) -> None:
    """The nodes that a worker must not start on are fixed when it is started, and it may wait without end for room on
    other nodes. So a worker that is still starting is replaced when one of these nodes may be used again."""
    before, after = ({node.node_id for node in nodes} for nodes in (turn.target.avoided, avoided))
    turn.target = replace(turn.target, avoided=avoided)
    for worker in turn.pool.workers:
        if not worker.warm and not (before - after).isdisjoint(worker.avoids):
            turn.kill(worker.index, "a node may be used again")


def _checkpoint_found(turn: Turn, name: str | None) -> None:
    if turn.stage not in (Stage.OPENING, Stage.FALLING_BACK):
        return  # the second answer to a repeated request
    reports.remember_newest(turn, name)
    if turn.stage is Stage.OPENING:
        turn.enter(Starting(since=turn.now))
    else:
        turn.emit(CheckpointFallback(to=turn.checkpoints.newest))
        forming.plan_next(turn)


def _desired(turn: Turn, desired: Desired) -> None:
    turn.target = replace(turn.target, desired=desired)
    match desired:
        case Desired.CANCEL:
            turn.end(EndReason.CANCELLED, "cancelled on request")
        case Desired.PAUSE if not turn.state.group_active and turn.stage is not Stage.COMMITTING:
            turn.end(EndReason.PAUSED, "paused on request")
        case Desired.PAUSE | Desired.RUN:
            pass  # switching.consider asks a running group to stop at its next step boundary
