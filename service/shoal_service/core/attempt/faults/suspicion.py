"""Which nodes are suspected: the control plane puts them on probation, and nothing of ours is placed there meanwhile.

A node is told from its workers by its other workers: while one of them answers, the node is not at fault. And on
such thin evidence it is never suspected where there is no other node to go to: better to stay than to wait.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shoal_service.core.attempt.commands import SuspectNode
from shoal_service.core.attempt.faults.actions import RESPONSES, Suspicion
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.health import NodeLoss
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.job import IncidentCause

REPEATED = 3
"""Workers that a node loses ..."""
WINDOW_S = 600.0
"""... within so long; and the other nodes none, or few."""
_ONCE_S = 60.0
"""The workers of a node are lost one after the other; that is one suspicion."""


def process_was_lost(turn: Turn, worker: Worker, cause: IncidentCause) -> None:
    """Called once the worker is gone from the state."""
    node_id = worker.info.node_id if worker.info is not None else ""
    if not node_id or cause is IncidentCause.PREEMPTED:
        return
    recent = tuple(loss for loss in turn.health.losses if turn.now - loss.at < WINDOW_S)
    turn.health = replace(turn.health, losses=(*recent, NodeLoss(node_id=node_id, at=turn.now)))
    match RESPONSES[cause].suspicion:
        case Suspicion.ALWAYS:
            suspect(turn, node_id, RESPONSES[cause].words)
        case Suspicion.ALONE if is_alone(turn.state, node_id):
            suspect(turn, node_id, f"{RESPONSES[cause].words}; no other worker answers from there")
        case _ if _loses_too_many(turn.state, node_id):
            reason = f"{REPEATED} workers lost within {WINDOW_S / 60:.0f} minutes, and other nodes hardly lost any"
            suspect(turn, node_id, reason)


def suspect(turn: Turn, node_id: str, reason: str) -> None:
    last = turn.health.suspected.get(node_id)
    if last is None or turn.now - last > _ONCE_S:
        turn.health = replace(
            turn.health,
            suspected={**turn.health.suspected, node_id: turn.now},
            losses=tuple(loss for loss in turn.health.losses if loss.node_id != node_id),
        )
        turn.do(SuspectNode(node_id, reason))


def is_alone(state: Attempt, node_id: str, *, besides: int | None = None) -> bool:
    """No worker answers from that node (`besides` one), and there is another node that one does answer from."""
    nodes = [p.info.node_id for p in state.pool.usable if p.info is not None and p.index != besides]
    return node_id not in nodes and bool(nodes)


def _loses_too_many(state: Attempt, node_id: str) -> bool:
    lost = Counter(loss.node_id for loss in state.health.losses)
    elsewhere = {p.info.node_id for p in state.pool.usable if p.info is not None} - {node_id}
    return bool(elsewhere) and lost[node_id] >= REPEATED and 3 * max(lost[n] for n in elsewhere) <= lost[node_id]
