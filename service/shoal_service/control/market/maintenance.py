"""Maintenance windows: when nodes have to be empty, and how early their drain begins. Pure.

    used | drained: jobs leave | window: nothing runs there | used
         begins_at - lead      begins_at                    ends_at

The lead follows the drains that were measured on this cluster. The cluster reader calls this in each pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal_service.core.nodes import Drain, DrainSource, Node
from shoal_service.fleet_views import MaintenanceWindow

FIRST_LEAD_S = 120.0
"""As long as no drain was measured."""
MIN_LEAD_S = 30.0
MAX_LEAD_S = 3600.0
_MARGIN = 2.0


def lead_s(measured: Sequence[float]) -> float:
    """Seconds before a window at which the drain begins: twice the longest of these drains.

    Args:
        measured: seconds that recent drains took, from the order until no worker was left.
    """
    if not measured:
        return FIRST_LEAD_S
    return min(MAX_LEAD_S, max(MIN_LEAD_S, _MARGIN * max(measured)))


def window_drains(
    nodes: Sequence[Node],
    windows: Sequence[MaintenanceWindow],
    lead: float,
    now: float,
    begun: Mapping[str, Drain] | None = None,
) -> dict[str, Drain]:
    """By node id: the drains for windows that have begun or begin within the lead.

    `begun`: the answer of the last pass. A drain that has begun goes on: it may be the first one that was measured, and
    the lead that follows from it is shorter than the one that it had.
    """
    found: dict[str, Drain] = {}
    for window in sorted(windows, key=lambda one: (one.begins_at, one.window_id)):
        if now >= window.ends_at:
            continue
        drain = Drain(
            reason=f"maintenance window {window.window_id}: {window.reason}",
            requested_at=window.begins_at - lead,
            deadline=window.begins_at,
            source=DrainSource.WINDOW,
        )
        for node in nodes:
            known = (begun or {}).get(node.node_id)
            if known is not None and known.reason == drain.reason:
                found.setdefault(node.node_id, known)
            elif now >= drain.requested_at and covers(window, node):
                found.setdefault(node.node_id, drain)
    return found


def combined(requested: Mapping[str, Drain], windows: Mapping[str, Drain]) -> dict[str, Drain]:
    """The drains of both kinds. A node with both keeps the requested one, with the earlier deadline."""
    found = dict(windows)
    for node_id, drain in requested.items():
        deadlines = [one for one in (drain.deadline, windows[node_id].deadline if node_id in windows else None) if one]
        found[node_id] = drain.model_copy(update={"deadline": min(deadlines, default=None)})
    return found


def with_windows(
    nodes: Sequence[Node], windows: Sequence[MaintenanceWindow], lead: float, now: float
) -> tuple[Node, ...]:
    """The nodes with the time at which the drain for their next window begins."""
    return tuple(
        node.model_copy(
            update={
                "maintenance_at": min(
                    (one.begins_at - lead for one in windows if one.begins_at - lead > now and covers(one, node)),
                    default=None,
                )
            }
        )
        for node in nodes
    )


def covers(window: MaintenanceWindow, node: Node) -> bool:
    return node.node_id in window.nodes or node.ip in window.nodes
