"""3 QUIESCE: the group is lost, and its workers are made to leave `run`. Those that do not react are not waited for.

Workers report the snapshots that they hold when they leave, and those outside the group are asked for theirs. Called by
`witnesses`; `deadlines` interrupts after a grace, and evicts those that `unresponsive` names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_service.core.attempt import (
    hangs,
    large_groups,
    memory_snapshots,
)
from shoal_service.core.attempt.commands import Interrupt
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Quiescing, Stage, Switching
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.job import IncidentCause


def quiesce(turn: Turn) -> None:
    """Interrupt the group, unless that was done before."""
    if turn.stage is Stage.QUIESCING:
        return
    _enter(turn)
    interrupt_rest(turn)


def await_same_error(turn: Turn) -> None:
    """Quiesce the group, but interrupt it only after a grace: a slower rank may be about to raise the same error."""
    grace_s = turn.config.timeouts.user_error_grace_s + large_groups.later_s(len(turn.pool.workers))
    _enter(turn, interrupt_at=turn.now + grace_s)


def interrupt_rest(turn: Turn) -> None:
    """Interrupt the workers that are still in `run`."""
    quiescing = turn.current
    assert isinstance(quiescing, Quiescing)
    turn.stay(replace(quiescing, interrupt_at=None, interrupted_at=turn.now))
    turn.do(*(Interrupt(index, turn.group.generation) for index in turn.state.in_run))


def interrupt_acknowledged(turn: Turn, index: int, generation: int) -> None:
    worker = turn.pool.worker(index)
    if worker is not None and turn.stage is Stage.QUIESCING and generation == turn.group.generation:
        turn.pool = turn.pool.with_worker(replace(worker, acknowledged=generation))


@dataclass(frozen=True, slots=True)
class Eviction:
    index: int
    cause: IncidentCause
    witness: str
    reason: str


def unresponsive(state: Attempt, quiescing: Quiescing, now: float) -> list[Eviction]:
    """The workers of a lost group that are not waited for any longer, each with the reason, by rank."""
    if quiescing.interrupted_at is None:
        return []
    waited, quiesce_s = now - quiescing.interrupted_at, large_groups.quiesce_s(state)
    unresponsive_s = state.config.timeouts.unresponsive_s + large_groups.later_s(len(state.pool.workers))
    hung = state.incident is not None and state.incident.cause is IncidentCause.HUNG
    too_late = IncidentCause.HUNG if hung else IncidentCause.STUCK
    silent = hangs.unanswering(state, now) if hung else frozenset()
    generation, found = state.group.generation, []
    for index in state.in_run:
        worker = state.pool.worker(index)
        has_acknowledged = worker is not None and worker.acknowledged == generation
        if worker is not None and worker.unreachable_since is not None:
            reason = f"it does not answer, and generation {generation} has failed"
            found.append(Eviction(index, IncidentCause.UNREACHABLE, "no answer", reason))
        elif index in silent and not has_acknowledged:
            reason = f"it has left its polls unanswered for {hangs.silent_s(state):g} s or more"
            found.append(Eviction(index, IncidentCause.HUNG, "no answer", reason))
        elif not has_acknowledged and waited >= unresponsive_s:
            reason = f"it did not acknowledge the end of generation {generation} within {unresponsive_s:.3g} s"
            found.append(Eviction(index, too_late, "deadline", reason))
        elif waited >= quiesce_s:
            reason = f"it did not leave generation {generation} within {quiesce_s:.3g} s"
            found.append(Eviction(index, too_late, "deadline", reason))
    return found


def _enter(turn: Turn, *, interrupt_at: float | None = None) -> None:
    switching = turn.current
    durable = switching.durable if isinstance(switching, Switching) else not turn.target.keeps_snapshots
    turn.enter(Quiescing(since=turn.now, interrupt_at=interrupt_at, durable=durable))
    memory_snapshots.ask_others(turn)
