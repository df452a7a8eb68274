"""Steps that are not finite, ranks that compute wrong results, and ranks that hold wrong ones. `reports` calls this.

loss or gradient norm is not finite   health.non_finite decides: stop (`planning`), skip the step (the engine),
                                      or roll back to the newest durable checkpoint and leave the step out
a replayed micro-batch differs        the worker is killed, its node is suspected, and the group goes back to the
                                      newest durable checkpoint: the snapshots in memory are of a later time than
                                      the first wrong result
replicas of the state differ          the same, for the ranks that others outvote. If there is no majority, all of them
                                      are suspected and none is killed; a fault that stays is found again

After wrong results only what is older than the last clean comparison is trusted, see `checkpoints`.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt import checkpoints, suspicion, witnesses
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.training import NonFiniteStepSkipped
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.worker_reports import (
    ReplayMismatch,
    ReplicaMismatch,
    StepSkipped,
)


def step_skipped(turn: Turn, item: StepSkipped) -> None:
    """Note a skipped step. It counts as a completed step, since its samples are used up."""
    turn.progress = replace(turn.progress, step=max(turn.progress.step, item.step), advanced_at=turn.now)
    turn.emit(NonFiniteStepSkipped(step=item.step, loss=item.loss, grad_norm=item.grad_norm, ranks=item.ranks))


def replay_differed(turn: Turn, item: ReplayMismatch) -> None:
    state = turn.state
    if not 0 <= item.rank < len(state.group.workers) or not state.group_active:
        return
    message = (
        f"rank {item.rank} computes wrong results: {item.message}; snapshots in memory may hold them, so the state "
        "comes from the newest durable checkpoint"
    )
    every_steps = state.target.spec.health.replay_every_steps
    if every_steps is not None:
        checkpoints.distrust_later_than(turn, max(0, item.step - 1 - every_steps))
    witnesses.evict(turn, state.group.workers[item.rank], IncidentCause.CORRUPTED, "replay", message)


def replicas_differed(turn: Turn, item: ReplicaMismatch) -> None:
    state = turn.state
    if not state.group_active or not all(0 <= rank < len(state.group.workers) for rank in item.ranks):
        return
    workers = [state.group.workers[rank] for rank in item.ranks]
    message = f"{item.message}; the state comes from the newest checkpoint that is not later than step "
    message += f"{state.checkpoints.clean_step or 0}, the last that was found equal on all ranks"
    checkpoints.distrust_later_than(turn, state.checkpoints.clean_step or 0)
    if item.is_certain:
        for index in workers:
            witnesses.evict(turn, index, IncidentCause.CORRUPTED, "replicas", message)
        return
    witnesses.lose_group(turn, IncidentCause.CORRUPTED, "replicas", message)
    for index in workers:
        worker = turn.pool.worker(index)
        if worker is not None and worker.info is not None:
            suspicion.suspect(turn, worker.info.node_id, item.message)
