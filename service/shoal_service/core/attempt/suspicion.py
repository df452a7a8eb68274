"""Which nodes are suspected. The job starts no worker there until the node passes a test; the control plane decides
whether other jobs avoid it as well.

`witnesses`, `planning` and `stragglers` call this; the column `probation` of the table of faults says for which causes.
While another worker of the job answers from the node, the worker is at fault and not the node. A node is never
suspected if no worker answers from another one: a job on a doubtful node makes progress, a job without a node does not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shoal_service.core.attempt.commands import SuspectNode
from shoal_service.core.attempt.faults import FAULTS, Probation
from shoal_service.core.attempt.state.attempt import Attempt, NodeLoss
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.quantities import count_text
from shoal_workers.contract.job import IncidentCause

REPEATED = 3
"""A node is suspected if it loses this many workers within WINDOW_S, and every other node has lost at most a third as
many."""
WINDOW_S = 600.0
"""Lost workers of a node are counted together if they were lost within this time."""
_ONCE_S = 60.0
"""Losses of a node within this time are one suspicion, because a node that fails loses its workers one after the
other."""


def worker_was_lost(turn: Turn, worker: Worker, cause: IncidentCause) -> None:
    """Count a lost worker against its node, and suspect the node if it is due. Called once the worker is gone from the
    state, and not for one that was killed for lack of memory."""
    fault = FAULTS[cause]
    node_id = worker.info.node_id if worker.info is not None else ""
    if not node_id or fault.probation is Probation.NEVER:
        return
    recent = tuple(loss for loss in turn.health.losses if turn.now - loss.at < WINDOW_S)
    loss = NodeLoss(node_id=node_id, at=turn.now, worker_id=worker.worker_id)
    turn.health = replace(turn.health, losses=(*recent, loss))
    decision = decide(turn.state, node_id, cause)
    if decision:
        suspect(turn, node_id, decision.reason)


def forget_loss(turn: Turn, worker_id: str) -> None:
    """Do not count a loss: the worker was killed for lack of memory, so its node is full, which says nothing against
    the node."""
    losses = tuple(loss for loss in turn.health.losses if loss.worker_id != worker_id)
    if len(losses) < len(turn.health.losses):
        turn.health = replace(turn.health, losses=losses)


def decide(state: Attempt, node_id: str, cause: IncidentCause) -> Decision:
    """Whether the node is suspected now that it has lost a worker for this cause."""
    fault = FAULTS[cause]
    if fault.probation is Probation.ALWAYS:
        return Decision(True, fault.words)
    if fault.probation is Probation.ALONE and is_alone(state, node_id):
        return Decision(True, f"{fault.words}; no other worker answers from there")
    return _loses_too_many(state, node_id)


def suspect(turn: Turn, node_id: str, reason: str) -> None:
    last = turn.health.suspected.get(node_id)
    if last is None or turn.now - last > _ONCE_S:
        turn.health = replace(
            turn.health,
            suspected={**turn.health.suspected, node_id: turn.now},
            losses=tuple(loss for loss in turn.health.losses if loss.node_id != node_id),
        )
        turn.do(SuspectNode(node_id, reason))


def is_alone(state: Attempt, node_id: str, *, besides: int | None = None) -> Decision:
    """Whether no worker (`besides` this one) answers from the node while one answers from another node."""
    nodes = {p.info.node_id for p in state.pool.usable if p.info is not None and p.index != besides}
    if node_id in nodes:
        return Decision(False, "another worker answers from the node")
    others = count_text(len(nodes), "other node")
    return Decision(bool(nodes), f"no other worker answers from the node; workers answer from {others}")


def _loses_too_many(state: Attempt, node_id: str) -> Decision:
    lost = Counter(loss.node_id for loss in state.health.losses)
    elsewhere = {p.info.node_id for p in state.pool.usable if p.info is not None} - {node_id}
    most = max((lost[node] for node in elsewhere), default=0)
    is_repeated = bool(elsewhere) and lost[node_id] >= REPEATED and 3 * most <= lost[node_id]
    reason = (
        f"{count_text(lost[node_id], 'worker')} lost within {WINDOW_S / 60:.0f} minutes, and at most {most} on any "
        "other node"
    )
    return Decision(is_repeated, reason)
