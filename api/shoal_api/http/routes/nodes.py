"""Routes about the nodes of the cluster: list, show, drain, cordon, and undo both; the notice of a cloud.

The store holds drains and cordons, so they outlive this process. The control loop passes them to the scheduler and to
every supervisor within two seconds.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from shoal_api.http.context import Context
from shoal_api.http.documents import body
from shoal_api.http.json_router import AppContext, JsonRouter, Reading, Writing
from shoal_api.http.problems import NodeNotFound
from shoal_api.http.routes.operated_clusters import CordonBody
from shoal_service.core.access import Permission
from shoal_service.core.nodes import Cordon, DrainSource, Node, cordon_of_cluster, with_drains
from shoal_service.fleet_views import (
    DrainRequest,
    NodeView,
    NoticeRequest,
)
from shoal_service.store import Conflict, cluster_links, histories, node_records
from shoal_service.store.database import Transaction
from shoal_service.views import Page

NodeId = Annotated[
    str, Path(pattern=r"^[0-9a-f]{1,64}$", description="Ray's id of the node, in full length, from GET /v1/nodes.")
]
NodeOrAddress = Annotated[
    str, Path(pattern=r"^[0-9A-Za-z.:_-]{1,64}$", description="Ray's id of the node in full length, or its address.")
]
_DRAIN = {"reason": "kernel update", "deadline_s": 600}
_NOTICE = {"deadline_s": 120, "reason": "spot instance reclaimed"}

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
