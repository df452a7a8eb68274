"""Chooses the node on which a new worker ought to be. Pure, and so apart from its only caller, which has Ray
(`supervisor/workers/ray_fleet.py`).

A wish, not an order: Ray places the worker elsewhere if the node has no room by then. `pack` keeps the number of nodes
small, and counts room in blocks of tp workers, because a tp group has to be on one node:

    tp 2, room 3 on A and 4 on B, four workers are missing        B B B B     one node
    tp 2, room 3 on A and 3 on B, four workers are missing        A A B B     no tp group on two nodes
    tp 2, A holds 2 and has room for 2, B is empty, 1 missing     A           beside the others

`spread` takes the node with the fewest workers of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_workers.contract.placing import Placement


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node on which the worker may be."""

    node_id: str
    room: int
    """Number of further workers of this job that fit."""
    held: int = 0
    """Number of workers of this job that are there, or on their way."""


def choose_node(nodes: Sequence[NodeRoom], *, num_missing: int, tp: int, placement: Placement) -> str:
    """The id of the chosen node; empty: no node has room.

    Args:
        num_missing: workers that are about to be started, this one included.
        tp: workers of a tensor-parallel group.
    """
    roomy = [node for node in nodes if node.room > 0]
    if not roomy:
        return ""
    if placement is Placement.SPREAD:
        return min(roomy, key=lambda node: (node.held, -node.room, node.node_id)).node_id
    return min(roomy, key=lambda node: _order(node, num_missing, tp)).node_id


def _order(node: NodeRoom, num_missing: int, tp: int) -> tuple[int, int, int, str]:
    """Sort key of a node; the least is the best. First come nodes that complete a tp group, then those with room for a
    whole one, and of these the nodes of the job; then the node that takes most of the missing workers, and has the
    least room to spare."""
    begun = node.held % tp
    wanted = min(num_missing, tp - begun)
    if node.room < wanted:
        return 3, -min(num_missing, node.room), 0, node.node_id
    whole = (node.held + node.room) // tp * tp - node.held
    takes = min(num_missing, max(wanted, whole))
    return 0 if begun else 1 if node.held else 2, -takes, node.room - takes, node.node_id
