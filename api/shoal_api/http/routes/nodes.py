"""Routes about the nodes of the cluster: list, show, drain, cordon, and undo both; the notice of a cloud; maintenance
windows.

The store holds drains, cordons and windows, so they outlive this process. The control loop passes them to the scheduler
and to every supervisor within two seconds, and drains nodes in time before a window.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from shoal_api.http.context import Context
from shoal_api.http.documents import body
from shoal_api.http.json_router import AppContext, JsonRouter, Reading, Writing
from shoal_api.http.problems import NodeNotFound
from shoal_api.http.routes.operated_clusters import CordonBody
from shoal_service.control.market.capacity import lead_s
from shoal_service.core.access import Permission
from shoal_service.core.nodes import Cordon, DrainSource, Node, cordon_of_cluster, with_drains
from shoal_service.fleet_views import (
    DrainRequest,
    MaintenanceWindow,
    NodeView,
    NoticeRequest,
    WindowRequest,
    WindowView,
)
from shoal_service.store import Conflict, WindowNotFound, cluster_links, histories, node_records
from shoal_service.store.database import Transaction
from shoal_service.views import Page

NodeId = Annotated[
    str, Path(pattern=r"^[0-9a-f]{1,64}$", description="Ray's id of the node, in full length, from GET /v1/nodes.")
]
NodeOrAddress = Annotated[
    str, Path(pattern=r"^[0-9A-Za-z.:_-]{1,64}$", description="Ray's id of the node in full length, or its address.")
]
WindowId = Annotated[str, Path(pattern=r"^mw-[0-9a-f]{8}$", description="Id of a window.")]
_DRAIN = {"reason": "kernel update", "deadline_s": 600}
_NOTICE = {"deadline_s": 120, "reason": "spot instance reclaimed"}
_WINDOW = {"nodes": ["10.0.0.7"], "begins_at": 1893456000, "ends_at": 1893463200, "reason": "new switches"}

router = JsonRouter("/v1", "operations")


@router.route("GET /nodes", Permission.CLUSTER_READ, "List the nodes of the cluster")
def list_nodes(tx: Reading, context: AppContext) -> Page[NodeView]:
    """Lists all nodes, also dead ones, with their resources, drains and probations."""
    return Page[NodeView](items=list_seen(tx, context))


@router.route("GET /nodes/{node_id}", Permission.CLUSTER_READ, "Show a node", raises=[NodeNotFound])
def show_node(tx: Reading, context: AppContext, node_id: NodeId) -> NodeView:
    """Returns one node of the cluster."""
    return _find(tx, context, node_id)


@router.route(
    "POST /nodes/{node_id}/drain",
    Permission.CLUSTER_CHANGE,
    "Drain a node",
    status=202,
    raises=[NodeNotFound, Conflict],
)
def drain_node(
    tx: Writing,
    context: AppContext,
    node_id: NodeId,
    drain: Annotated[DrainRequest, body(DrainRequest, _DRAIN, required=False)],
) -> NodeView:
    """Jobs leave the node at their next step boundary and lose no step; no new worker is placed there. With
    `deadline_s`, they leave before that time. A repeated request replaces reason and deadline."""
    if not _find(tx, context, node_id).alive:
        raise Conflict(f"Node {node_id} is dead and cannot be drained.")
    now = context.clock()
    deadline = None if drain.deadline_s is None else now + drain.deadline_s
    node_records.request_drain(tx, node_id, reason=drain.reason, deadline=deadline, now=now)
    return _find(tx, context, node_id)


@router.route(
    "DELETE /nodes/{node_id}/drain",
    Permission.CLUSTER_CHANGE,
    "Use a drained node again",
    raises=[NodeNotFound, Conflict],
)
def undo_drain(tx: Writing, context: AppContext, node_id: NodeId) -> NodeView:
    """Does nothing to a node that is not drained. A drain that Ray announced cannot be undone."""
    drain = _find(tx, context, node_id).drain
    if drain is not None and drain.source is DrainSource.RAY:
        raise Conflict(f"Ray drains node {node_id}, and Shoal cannot undo that.")
    if drain is not None and drain.source is DrainSource.WINDOW:
        raise Conflict(f"Node {node_id} is drained for a {drain.reason.partition(':')[0]}. Cancel that instead.")
    node_records.undo_drain(tx, node_id)
    return _find(tx, context, node_id)


@router.route(
    "POST /nodes/{node_id}/cordon",
    Permission.CLUSTER_CHANGE,
    "Cordon a node",
    status=202,
    raises=[NodeNotFound, Conflict],
)
def cordon_node(tx: Writing, context: AppContext, node_id: NodeId, cordon: CordonBody) -> NodeView:
    """No new worker is placed on the node; those that are there stay. A repeated request replaces the reason."""
    if not _find(tx, context, node_id).alive:
        raise Conflict(f"Node {node_id} is dead and cannot be cordoned.")
    node_records.cordon(tx, node_id, reason=cordon.reason, now=context.clock())
    return _find(tx, context, node_id)


@router.route(
    "DELETE /nodes/{node_id}/cordon",
    Permission.CLUSTER_CHANGE,
    "Place workers on a cordoned node again",
    raises=[NodeNotFound, Conflict],
)
def undo_cordon(tx: Writing, context: AppContext, node_id: NodeId) -> NodeView:
    """Does nothing to a node that is not cordoned. A node stays cordoned while its cluster is."""
    _find(tx, context, node_id)
    node_records.uncordon(tx, node_id)
    return _find(tx, context, node_id)


@router.route(
    "POST /nodes/{node}/preemption-notice",
    Permission.CLUSTER_CHANGE,
    "Announce that a node will be taken away",
    status=202,
    raises=[NodeNotFound, Conflict],
)
def announce_preemption(
    tx: Writing,
    context: AppContext,
    node: NodeOrAddress,
    notice: Annotated[NoticeRequest, body(NoticeRequest, _NOTICE, required=False)],
) -> Page[NodeView]:
    """Hooks of a cloud or of Kubernetes call this: they know the machine by its address. All live nodes at the
    address are drained before the deadline; jobs leave at a step boundary and lose no step. The answer is these
    nodes."""
    node_ids = [seen.node_id for seen in list_seen(tx, context) if seen.alive and node in (seen.node_id, seen.ip)]
    if not node_ids:
        raise NodeNotFound(f"There is no live node {node}; GET /v1/nodes lists them.")
    now = context.clock()
    deadline = now + notice.deadline_s if notice.deadline_at is None else notice.deadline_at
    for node_id in node_ids:
        node_records.request_drain(
            tx, node_id, reason=notice.reason, deadline=deadline, now=now, source=DrainSource.NOTICE
        )
    return Page[NodeView](items=tuple(seen for seen in list_seen(tx, context) if seen.node_id in node_ids))


@router.route("GET /maintenance-windows", Permission.CLUSTER_READ, "List the maintenance windows")
def list_windows(tx: Reading) -> Page[WindowView]:
    """Lists windows, the earliest first; those that have ended are listed for a day."""
    return Page[WindowView](items=tuple(_window_view(tx, window) for window in node_records.windows(tx)))


@router.route(
    "POST /maintenance-windows",
    Permission.CLUSTER_CHANGE,
    "Plan a maintenance window",
    status=201,
    raises=[Conflict],
)
def plan_window(
    tx: Writing, context: AppContext, plan: Annotated[WindowRequest, body(WindowRequest, _WINDOW)]
) -> WindowView:
    """The nodes are drained so early that they are empty when the window begins, and are used again when it ends.
    Jobs leave at a step boundary and lose no step."""
    now = context.clock()
    if plan.ends_at <= now:
        raise Conflict("The window has ended already: ends_at is not in the future.")
    window = node_records.plan_window(
        tx, plan.nodes, begins_at=plan.begins_at, ends_at=plan.ends_at, reason=plan.reason, now=now
    )
    return _window_view(tx, window)


@router.route(
    "DELETE /maintenance-windows/{window_id}",
    Permission.CLUSTER_CHANGE,
    "Cancel a maintenance window",
    status=204,
    raises=[WindowNotFound],
)
def cancel_window(tx: Writing, window_id: WindowId) -> None:
    """Its nodes are used again, also if the window has begun."""
    node_records.cancel_window(tx, window_id)


def list_seen(tx: Transaction, context: Context) -> tuple[NodeView, ...]:
    """Return the nodes as the control loop saw them last, with the current drains and cordons."""
    nodes = with_drains(context.cluster.snapshot().nodes, node_records.drains(tx))
    num_workers, cordons = histories.read_workers_by_node(tx), node_records.cordons(tx)
    of_clusters = {entry.name: cordon_of_cluster(entry.name, entry.cordon) for entry in cluster_links.entries(tx)}

    def cordon_of(node: Node) -> Cordon | None:
        return cordons.get(node.node_id) or of_clusters.get(node.cluster)

    return tuple(
        NodeView.of(node.model_copy(update={"cordon": cordon_of(node)}), num_workers=num_workers[node.node_id])
        for node in nodes
    )


def _find(tx: Transaction, context: Context, node_id: str) -> NodeView:
    """Raises NodeNotFound."""
    for node in list_seen(tx, context):
        if node.node_id == node_id:
            return node
    raise NodeNotFound(f"There is no node {node_id}; GET /v1/nodes lists them.")


def _window_view(tx: Transaction, window: MaintenanceWindow) -> WindowView:
    lead = lead_s(node_records.read_drain_times(tx))
    return WindowView(**window.model_dump(), drains_at=window.begins_at - lead)
