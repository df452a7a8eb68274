"""Steps that are not finite, and ranks that compute wrong: the state in memory is not what it should be.

loss or gradient not finite   health.non_finite: stop; skip (the engine does it); roll back to the newest durable
                              checkpoint and leave that step out on the way
replay differs                the rank is killed, its node suspected, and the group goes back to what is durable:
                              the snapshots in memory were taken after it had begun to compute wrong
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.group import leaving
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.generations import NonFiniteStepSkipped
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ReplayMismatch, StepSkipped


def step_skipped(turn: Turn, item: StepSkipped) -> None:
    """It counts as a step: its samples are used up."""
    turn.progress = replace(turn.progress, step=max(turn.progress.step, item.step), advanced_at=turn.now)
    turn.emit(NonFiniteStepSkipped(step=item.step, loss=item.loss, grad_norm=item.grad_norm))


def suspect_named(turn: Turn, item: ReplayMismatch) -> None:
    state = turn.state
    if not 0 <= item.rank < len(state.group.workers) or not state.group_active:
        return
    message = (
        f"rank {item.rank} computes wrong: {item.message}; snapshots in memory may carry its errors, so the state "
        "comes from the newest durable checkpoint"
    )
    leaving.evict(turn, state.group.workers[item.rank], IncidentCause.CORRUPTED, "replay", message)
