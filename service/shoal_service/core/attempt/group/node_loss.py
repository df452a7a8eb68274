"""What the loss of a worker, and of a node, would cost the running group, and why. Pure; called by `blame` and by the
status.

A worker:

    its state itself is in shared memory             1 step
    there are copies in shared memory                the steps between two of them
    otherwise                                        the steps since the newest checkpoint

A node:

    every shard has a replica on another node        at most the pace of the snapshots      (on CPU: 1 step)
    all nodes are on one machine                     the same
    a gradient log is in force                       1 step, now its lag
    every buddy has a copy of one step               the steps between two copies, and until they have arrived
    otherwise                                        the steps since the newest checkpoint

The figures are those that the workers report (SnapshotCost). Until a group has reported any, only the
checkpoint counts.
"""

from __future__ import annotations

from math import ceil

from shoal_service.core.attempt.group.replicas import lonely_ranks
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.node_loss import NodeLossBound, Protection, WorkerLossBound
from shoal_workers.contract.worker_reports import SnapshotCost


def node_loss_bound(state: Attempt) -> NodeLossBound | None:
    """None: no group has formed yet."""
    if not state.group.machines or not state.history.has_formed:
        return None
    if not state.target.keeps_snapshots:
        return _from_checkpoint(state, "snapshot.enabled is false")
    if state.progress.stopped:
        first = min(state.progress.stopped.values(), key=lambda item: item.rank)
        return _from_checkpoint(state, f"rank {first.rank} has no memory for snapshots")
    cost = state.progress.snapshots
    if cost is None or cost.generation != state.group.generation:
        return _from_checkpoint(state, "the group has not reported a snapshot yet")
    nodes, machines = set(state.group.nodes), state.group.machines
    if state.group.layout is not None and not lonely_ranks(state.group.layout, machines):
        return _from_snapshots(Protection.REPLICAS, cost)
    if len(set(machines)) == 1:
        if len(nodes) > 1:
            return _from_snapshots(Protection.SHARED_MEMORY, cost)
        return _from_checkpoint(state, "all workers are on one node")
    if cost.log_lag_steps is not None:
        return NodeLossBound(
            protection=Protection.GRADIENT_LOG,
            at_most=max(1, cost.log_lag_steps),
            now=cost.log_lag_steps,
            every_steps=cost.buddy_every_steps,
            log_lag_steps=cost.log_lag_steps,
            log_share=cost.log_share,
        )
    if cost.buddy_step is None:
        return _from_checkpoint(state, "there is no copy of every rank on other nodes yet")
    return _from_copies(state, cost, cost.buddy_step)


def worker_loss_bound(state: Attempt) -> WorkerLossBound | None:
    """None: no group has formed yet, or it has not reported how it keeps snapshots."""
    if not state.group.machines or not state.history.has_formed:
        return None
    if not state.target.keeps_snapshots:
        return _repeated_from_checkpoint(state, "snapshot.enabled is false")
    if lacking := sorted(rank for rank, item in state.progress.stopped.items() if not item.only_copies):
        return _repeated_from_checkpoint(state, f"rank {lacking[0]} has no memory for snapshots")
    cost = state.progress.snapshots
    if cost is None or cost.generation != state.group.generation:
        return None
    steps = ceil(cost.every_steps)
    return WorkerLossBound(at_most=steps, reason=cost.copies_reason if steps > 1 else "")


def _repeated_from_checkpoint(state: Attempt, reason: str) -> WorkerLossBound:
    bound = _from_checkpoint(state, reason)
    return WorkerLossBound(at_most=bound.at_most, reason=bound.reason)


def with_more_steps(bound: NodeLossBound, steps: int) -> NodeLossBound:
    """The survivors have completed this many steps more than was known when the bound was noted."""
    if steps <= 0 or bound.protection not in (Protection.COPIES, Protection.CHECKPOINT):
        return bound
    now = bound.now + steps
    return bound.model_copy(update={"now": now, "at_most": None if bound.at_most is None else max(now, bound.at_most)})


def _from_copies(state: Attempt, cost: SnapshotCost, buddy_step: int) -> NodeLossBound:
    """The next copies are made at the first snapshot at which they are due, but not before the last ones have arrived:

        copies of step 32 ......... arrived at 48: copies of 48 ......... arrived at 64
                                                                        ^ up to here the group goes back to 32

    A newer checkpoint is used instead."""
    now = max(0, state.progress.step - max(buddy_step, state.checkpoints.durable_step))
    flight = cost.buddy_flight_steps
    between = max(ceil(cost.buddy_every_steps) + ceil(cost.every_steps) - 1, flight)
    return NodeLossBound(
        protection=Protection.COPIES,
        at_most=max(now, between + flight),
        now=now,
        every_steps=cost.buddy_every_steps,
        reason=cost.log_reason,
    )


def _from_snapshots(protection: Protection, cost: SnapshotCost) -> NodeLossBound:
    """The node dies in the middle of an update at worst: then its newest snapshot is the one before."""
    steps = ceil(cost.every_steps)
    return NodeLossBound(protection=protection, at_most=steps, now=steps - 1)


def _from_checkpoint(state: Attempt, reason: str) -> NodeLossBound:
    now = max(0, state.progress.step - state.checkpoints.durable_step)
    every = state.target.spec.checkpoint.every_steps
    return NodeLossBound(
        protection=Protection.CHECKPOINT, at_most=None if every is None else max(now, every), now=now, reason=reason
    )
