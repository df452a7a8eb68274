"""Steps that are not finite, and ranks that compute wrong results. `reports` calls this.

loss or gradient norm is not finite   health.non_finite decides: stop (`group/follow_up`), skip the step (the engine),
                                      or roll back to the newest durable checkpoint and leave the step out
a replayed micro-batch differs        the worker is killed, its node is suspected, and the group goes back to the
                                      newest durable checkpoint: the snapshots in memory are of a later time than
                                      the first wrong result
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.group import exits
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.generations import NonFiniteStepSkipped
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.worker_reports import ReplayMismatch, StepSkipped


def step_skipped(turn: Turn, item: StepSkipped) -> None:
    """A skipped step counts as a step, since its samples are used up."""
    turn.progress = replace(turn.progress, step=max(turn.progress.step, item.step), advanced_at=turn.now)
    turn.emit(NonFiniteStepSkipped(step=item.step, loss=item.loss, grad_norm=item.grad_norm))


def replay_differed(turn: Turn, item: ReplayMismatch) -> None:
    state = turn.state
    if not 0 <= item.rank < len(state.group.workers) or not state.group_active:
        return
    message = (
        f"rank {item.rank} computes wrong results: {item.message}; snapshots in memory may hold them, so the state "
        "comes from the newest durable checkpoint"
    )
    exits.evict(turn, state.group.workers[item.rank], IncidentCause.CORRUPTED, "replay", message)
