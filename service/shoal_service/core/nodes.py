"""Which nodes may be used, given drains that were requested, drains that Ray announces, and probation.

The control loop calls this once per pass. The scheduler gets the result as capacity, and every supervisor gets it in
its directive: it places no worker on an avoided node, and moves away from those that it already uses. This module
starts no test of a node; `cluster/probation.py` does.
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
    """Requested by a user."""
    RAY = "ray"
    """Announced by the cluster."""


class Drain(Frozen):
    """Why a node shall not be used any more, and until when."""

    reason: str
    requested_at: float
    deadline: float | None = None
    """Wall-clock time at which the node goes away; None: it stays, but no job shall run on it."""
    source: DrainSource


class Node(Frozen):
    """A node of the Ray cluster, and what is known about it beyond that."""

    node_id: str
    ip: str
    alive: bool
    cpus: float
    gpus: float
    memory_gib: float
    drain: Drain | None = None
    suspected: str = ""
    """Why the node is on probation; empty: it is not."""
    suspected_since: float | None = None
    next_test_at: float | None = None
    """When its probation test runs next. Until a test passes, no new worker is placed there."""


@dataclass(frozen=True, slots=True)
class NodeSuspicion:
    """Why a node is on probation."""

    reason: str
    since: float
    next_test_at: float


def described(
    nodes: Sequence[Node], drains: Mapping[str, Drain], suspicions: Mapping[str, NodeSuspicion]
) -> tuple[Node, ...]:
    """The nodes that Ray reports, with drains and suspicions filled in."""
    shown = list(with_drains(nodes, drains))
    for position, node in enumerate(shown):
        found = suspicions.get(node.node_id)
        if found is not None:
            update = {"suspected": found.reason, "suspected_since": found.since, "next_test_at": found.next_test_at}
            shown[position] = node.model_copy(update=update)
    if not any(_is_sound(node) for node in shown):
        shown = [_used_although_suspected(node) for node in shown]
    return tuple(shown)


def with_drains(nodes: Sequence[Node], drains: Mapping[str, Drain]) -> tuple[Node, ...]:
    """The nodes with the drains requested now. A drain by Ray takes precedence, since it cannot be undone."""
    return tuple(
        node
        if node.drain is not None and node.drain.source is DrainSource.RAY
        else node.model_copy(update={"drain": drains.get(node.node_id)})
        for node in nodes
    )


def avoided(nodes: Sequence[Node]) -> tuple[AvoidedNode, ...]:
    """The nodes that supervisors must avoid, ordered by id; `nodes` come from `described`.

    While there is no sound node, suspected nodes are used: a suspected node is better than none. Drained nodes are
    always avoided.
    """
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
    """The nodes whose capacity counts: alive, and not avoided."""
    excluded = {node.node_id for node in avoided(nodes)}
    return tuple(node for node in nodes if node.alive and node.node_id not in excluded)


def next_test_delay_s(probation_s: float, num_failed: int) -> float:
    """Seconds until the next test of a suspected node; they double with each failed test."""
    return min(max(MAX_TEST_DELAY_S, probation_s), probation_s * 2.0 ** min(num_failed, 30))


def partner_for_test(suspect: str, nodes: Sequence[Node]) -> str | None:
    """A sound node to test the suspect with; None: there is none, and the suspect is tested alone."""
    return next((node.node_id for node in nodes if node.node_id != suspect and _is_sound(node)), None)


def _is_sound(node: Node) -> bool:
    """Alive, not suspected, not drained, and with CPUs or GPUs."""
    return node.alive and not node.suspected and node.drain is None and (node.cpus > 0 or node.gpus > 0)


def _used_although_suspected(node: Node) -> Node:
    if not node.suspected or not node.alive or node.drain is not None:
        return node
    return node.model_copy(update={"suspected": f"{node.suspected} (still used, since no other node is sound)"})
