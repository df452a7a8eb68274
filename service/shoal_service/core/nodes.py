"""Which nodes may be used: drains that were asked for, drains that Ray announces, probation. Pure.

The control loop asks once per pass; the answer goes to the scheduler (capacity) and, in the directive, to every
supervisor (placement, and leaving what it already has there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_workers.contract.base import Frozen

MAX_TEST_DELAY_S = 6 * 3600.0


class DrainSource(StrEnum):
    API = "api"
    """A user asked for it."""
    RAY = "ray"
    """The cluster announced it."""


class Drain(Frozen):
    """The request to leave a node."""

    reason: str
    requested_at: float
    deadline: float | None = None
    """Wall-clock time at which the node goes away; None: it stays, nothing shall run on it."""
    source: DrainSource


class Node(Frozen):
    node_id: str
    ip: str
    alive: bool
    cpus: float
    gpus: float
    memory_gib: float
    drain: Drain | None = None
    suspected: str = ""
    """Why it is on probation; empty: it is not."""
    suspected_since: float | None = None
    next_test_at: float | None = None
    """When the probation test of it runs next; until one passes, no new process is placed there."""


@dataclass(frozen=True, slots=True)
class NodeSuspicion:
    """Why a node is on probation."""

    reason: str
    since: float
    next_test_at: float


def described(
    nodes: Sequence[Node], drains: Mapping[str, Drain], doubts: Mapping[str, NodeSuspicion]
) -> tuple[Node, ...]:
    """Ray's nodes, with what is known of them beyond that."""
    shown = list(with_drains(nodes, drains))
    for place, node in enumerate(shown):
        doubt = doubts.get(node.node_id)
        if doubt is not None:
            told = {"suspected": doubt.reason, "suspected_since": doubt.since, "next_test_at": doubt.next_test_at}
            shown[place] = node.model_copy(update=told)
    if not any(_is_sound(node) for node in shown):
        shown = [_used_all_the_same(node) for node in shown]
    return tuple(shown)


def with_drains(nodes: Sequence[Node], drains: Mapping[str, Drain]) -> tuple[Node, ...]:
    """With the drains that were asked for as they are now. Ray's own goes before: it cannot be undone."""
    return tuple(
        node
        if node.drain is not None and node.drain.source is DrainSource.RAY
        else node.model_copy(update={"drain": drains.get(node.node_id)})
        for node in nodes
    )


def avoided(nodes: Sequence[Node]) -> tuple[AvoidedNode, ...]:
    """What supervisors are told of `described` nodes, ordered by id. Suspected nodes are used while there is no sound
    one: a doubtful node is better than none. A drain is an order, and has no such exception."""
    sound = any(_is_sound(node) for node in nodes)
    found = []
    for node in sorted(nodes, key=lambda n: n.node_id):
        if not node.alive:
            continue
        if node.drain is not None:
            found.append(
                AvoidedNode(node_id=node.node_id, reason=f"drained: {node.drain.reason}", deadline=node.drain.deadline)
            )
        elif node.suspected and sound:
            found.append(AvoidedNode(node_id=node.node_id, reason=f"on probation: {node.suspected}"))
    return tuple(found)


def usable(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The living nodes whose capacity counts."""
    barred = {node.node_id for node in avoided(nodes)}
    return tuple(node for node in nodes if node.alive and node.node_id not in barred)


def next_test_delay_s(probation_s: float, num_failed: int) -> float:
    """Seconds until the next test of a suspected node: twice as long after each one that failed."""
    return min(max(MAX_TEST_DELAY_S, probation_s), probation_s * 2.0 ** min(num_failed, 30))


def partner_for_test(suspect: str, nodes: Sequence[Node]) -> str | None:
    """A sound node to test the suspect against; None: there is none, and it is tested alone."""
    return next((node.node_id for node in nodes if node.node_id != suspect and _is_sound(node)), None)


def _is_sound(node: Node) -> bool:
    """Alive, not suspected, not going away, and it has something to compute with."""
    return node.alive and not node.suspected and node.drain is None and (node.cpus > 0 or node.gpus > 0)


def _used_all_the_same(node: Node) -> Node:
    if not node.suspected or not node.alive or node.drain is not None:
        return node
    return node.model_copy(update={"suspected": f"{node.suspected} (used all the same: there is no sound node)"})
