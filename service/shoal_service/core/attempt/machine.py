"""step(state, event, now) -> (state, commands): what an attempt does about whatever happens to it. Pure.

    a member is lost, by death, stuck survivor, broken collective
      1 QUIESCE  fence generation g, wake every survivor out of its collective, wait until each has left `run`
      2 PLAN     members = survivors + warm spares, up to the grant; newest committed checkpoint
      3 FORM     run(g+1) in the same processes
      4 RUN      the first completed step closes the incident

A planned change (grow, shrink, pause) asks for a stop at the next step boundary instead, commits the checkpoint of that
very step, and forms from it: nothing is lost.
"""

from __future__ import annotations

from typing import assert_never

from shoal_service.core.attempt import forming, leaving, news, processes
from shoal_service.core.attempt.commands import Command, Commit, FindCheckpoint, Interrupt, RequestYield
from shoal_service.core.attempt.events import (
    Beat,
    CheckpointCommitted,
    CheckpointFound,
    CommitFailed,
    ElasticityChanged,
    Event,
    GrantChanged,
    HoldingsTold,
    InterruptHeard,
    NewsArrived,
    NodesAvoided,
    ProcessFailedToStart,
    ProcessLost,
    ProcessUnreachable,
    ProcessWarm,
    RunReturned,
    StorageUnusable,
    Tick,
    WantedChanged,
)
from shoal_service.core.attempt.state import Attempt, Stage, Wanted
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.job import EndReason, IncidentCause


def open_attempt() -> tuple[Command, ...]:
    """The commands that set a new attempt in motion."""
    return (FindCheckpoint(),)


def reopen(state: Attempt) -> tuple[Command, ...]:
    """What was asked for and never answered, to be asked again after the supervisor's own death. All of it is harmless
    to repeat."""
    in_run = [p.index for p in state.processes if p.in_run]
    commits = tuple(
        Commit(name, tuple(parts[rank] for rank in sorted(parts)))
        for name, parts in state.parts.items()
        if name in state.committing
    )
    match state.stage:
        case Stage.OPENING | Stage.FALLING_BACK:
            return (*commits, FindCheckpoint(excluding=state.damaged))
        case Stage.QUIESCING:
            return (*commits, *(Interrupt(index, state.generation) for index in in_run))
        case Stage.SWITCHING:
            return (*commits, *(RequestYield(index, state.generation) for index in in_run))
        case _:
            return commits


def step(state: Attempt, event: Event, now: float) -> tuple[Attempt, tuple[Command, ...]]:
    """The next state, and what to do about it. An ended attempt stays as it is."""
    if state.stage is Stage.ENDED:
        return state, ()
    turn = Turn(state, now)
    match event:
        case CheckpointFound(name):
            _checkpoint_found(turn, name)
        case StorageUnusable(message):
            turn.end(EndReason.STORAGE_FAILED, message)
        case ProcessWarm(index, info):
            processes.warm(turn, index, info)
        case ProcessFailedToStart(index, error):
            processes.failed_to_start(turn, index, error)
        case ProcessLost(index, cause, witness, message):
            leaving.process_lost(turn, index, cause, witness, message)
        case RunReturned(index, shard_exit):
            leaving.run_returned(turn, index, shard_exit)
        case NewsArrived(index, item):
            news.arrived(turn, index, item)
        case CheckpointCommitted(name, generation, committed_step):
            news.committed(turn, name, generation, committed_step)
        case CommitFailed(name, generation, _, message):
            news.commit_failed(turn, name, generation, message)
        case GrantChanged(workers):
            turn.set(granted=workers)
        case ElasticityChanged(elasticity):
            turn.set(spec=turn.state.spec.model_copy(update={"elasticity": elasticity}))
        case WantedChanged(wanted):
            _wanted(turn, wanted)
        case Beat() | InterruptHeard() | HoldingsTold() | ProcessUnreachable() | NodesAvoided():
            pass
        case Tick():
            _deadlines(turn)
        case _:
            assert_never(event)
    if turn.state.stage is not Stage.ENDED:
        forming.consider(turn)
    if turn.state.stage is not Stage.ENDED:
        processes.replenish(turn)
    return turn.state, tuple(turn.commands)


def _checkpoint_found(turn: Turn, name: str | None) -> None:
    if turn.state.stage not in (Stage.OPENING, Stage.FALLING_BACK):
        return  # an answer that was asked for twice
    news.remember_newest(turn, name)
    if turn.state.stage is Stage.OPENING:
        turn.enter(Stage.STARTING)
    else:
        turn.emit("checkpoint.fallback", to=turn.state.newest)
        forming.plan_next(turn)


def _wanted(turn: Turn, wanted: Wanted) -> None:
    turn.set(wanted=wanted)
    match wanted:
        case Wanted.CANCEL:
            turn.end(EndReason.CANCELLED, "cancelled on request")
        case Wanted.PAUSE if not turn.state.group_active and turn.state.stage is not Stage.COMMITTING:
            turn.end(EndReason.PAUSED, "paused on request")
        case Wanted.PAUSE | Wanted.RUN:
            pass  # a running group is asked to stop at its next step boundary by forming.consider


def _deadlines(turn: Turn) -> None:
    state = turn.state
    waited, timeouts = turn.now - state.since, state.timeouts
    match state.stage:
        case Stage.OPENING | Stage.FALLING_BACK if waited > timeouts.commit_s:
            turn.end(EndReason.STORAGE_FAILED, f"{state.checkpoint_root} did not answer for {waited:.0f} s")
        case Stage.STARTING if waited > timeouts.start_s and state.num_usable < state.min_workers:
            turn.end(
                EndReason.CAPACITY_TIMEOUT,
                f"only {state.num_usable} of at least {state.min_workers} workers started within {waited:.0f} s",
            )
        case Stage.WAITING if waited > state.spec.elasticity.wait_s and state.num_usable < state.min_workers:
            turn.end(
                EndReason.CAPACITY_TIMEOUT,
                f"{state.num_usable} of at least {state.min_workers} workers (elasticity.min_workers) for "
                f"{waited:.0f} s (elasticity.wait_s)",
            )
        case Stage.FORMING if waited > timeouts.form_s:
            leaving.lose_group(
                turn, IncidentCause.FORM_FAILED, "deadline", f"the group did not come together within {waited:.0f} s"
            )
        case Stage.SWITCHING if waited > timeouts.switch_s:
            leaving.lose_group(
                turn, IncidentCause.COLLECTIVE_FAILED, "deadline", f"no step boundary was reached in {waited:.0f} s"
            )
        case Stage.QUIESCING if waited > timeouts.quiesce_s:
            leaving.evict_stuck(turn)
        case Stage.QUIESCING if state.interrupt_at is not None and turn.now >= state.interrupt_at:
            leaving.interrupt_rest(turn)
        case Stage.COMMITTING if waited > timeouts.commit_s:
            leaving.go_on_without_commit(turn, f"the commit took longer than {waited:.0f} s")
        case _:
            pass
