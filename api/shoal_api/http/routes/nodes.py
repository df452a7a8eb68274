"""Routes about the nodes of the cluster: list, show, drain, cordon, and undo both; the notice of a
cloud.

The store holds drains and cordons, so they outlive this process. The control loop passes them to the scheduler and to
every supervisor within two seconds.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import needs
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_model, require_no_body
from shoal_api.http.openapi import body_of
from shoal_api.http.problems import Kind, ProblemError
from shoal_service.core.access import Permission
from shoal_service.core.nodes import Cordon, DrainSource, Node, cordon_of_cluster, with_drains
from shoal_service.fleet_views import (
    CordonRequest,
    DrainRequest,
    NodeView,
    NoticeRequest,
)
from shoal_service.store import cluster_links, histories, node_records
from shoal_service.views import Page

NodeId = Annotated[
    str, Path(pattern=r"^[0-9a-f]{1,64}$", description="Ray's id of the node, in full length, from GET /v1/nodes.")
]
NodeOrAddress = Annotated[
    str, Path(pattern=r"^[0-9A-Za-z.:_-]{1,64}$", description="Ray's id of the node in full length, or its address.")
]
M = TypeVar("M", bound=BaseModel)


def node_routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/nodes", tags=["operations"])
    store = context.store

    @router.get(
        "",
        dependencies=[needs(Permission.CLUSTER_READ)],
        response_model=Page[NodeView],
        summary="List the nodes of the cluster",
    )
    async def list_nodes() -> Response:
        """Lists all nodes, also dead ones, with their resources, drains and probations."""
        page = Page[NodeView](items=await run_in_threadpool(nodes_of, context))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/{node_id}", dependencies=[needs(Permission.CLUSTER_READ)], response_model=NodeView, summary="Show a node"
    )
    async def show_node(node_id: NodeId) -> Response:
        """Returns one node of the cluster."""
        return _node_response(await run_in_threadpool(_node, context, node_id))

    @router.post(
        "/{node_id}/drain",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        status_code=202,
        response_model=NodeView,
        summary="Drain a node",
        openapi_extra=body_of("DrainRequest", JSON_TYPES, required=False),
    )
    async def drain_node(request: Request, node_id: NodeId) -> Response:
        """Jobs leave the node at their next step boundary and lose no step; no new worker is placed there. With
        `deadline_s`, they leave before that time. A repeated request replaces reason and deadline."""
        drain = await _request(request, DrainRequest)
        node = await run_in_threadpool(_node, context, node_id)
        if not node.alive:
            raise ProblemError(Kind.REQUEST_CONFLICT, f"Node {node_id} is dead and cannot be drained.")
        now = context.clock()
        deadline = None if drain.deadline_s is None else now + drain.deadline_s
        await run_in_threadpool(
            store.writing(node_records.request_drain), node_id, reason=drain.reason, deadline=deadline, now=now
        )
        return _node_response(await run_in_threadpool(_node, context, node_id), 202)

    @router.delete(
        "/{node_id}/drain",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        response_model=NodeView,
        summary="Use a drained node again",
    )
    async def undo_drain(node_id: NodeId) -> Response:
        """Does nothing to a node that is not drained. A drain that Ray announced cannot be undone."""
        node = await run_in_threadpool(_node, context, node_id)
        if node.drain is not None and node.drain.source is DrainSource.RAY:
            raise ProblemError(Kind.REQUEST_CONFLICT, f"Ray drains node {node_id}, and Shoal cannot undo that.")
        await run_in_threadpool(store.writing(node_records.undo_drain), node_id)
        return _node_response(await run_in_threadpool(_node, context, node_id))

    @router.post(
        "/{node_id}/cordon",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        status_code=202,
        response_model=NodeView,
        summary="Cordon a node",
        openapi_extra=body_of("CordonRequest", JSON_TYPES, required=False),
    )
    async def cordon_node(request: Request, node_id: NodeId) -> Response:
        """No new worker is placed on the node; those that are there stay. A repeated request replaces the reason."""
        cordon = await _request(request, CordonRequest)
        node = await run_in_threadpool(_node, context, node_id)
        if not node.alive:
            raise ProblemError(Kind.REQUEST_CONFLICT, f"Node {node_id} is dead and cannot be cordoned.")
        await run_in_threadpool(store.writing(node_records.cordon), node_id, reason=cordon.reason, now=context.clock())
        return _node_response(await run_in_threadpool(_node, context, node_id), 202)

    @router.delete(
        "/{node_id}/cordon",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        response_model=NodeView,
        summary="Place workers on a cordoned node again",
    )
    async def undo_cordon(node_id: NodeId) -> Response:
        """Does nothing to a node that is not cordoned. A node stays cordoned while its cluster is."""
        await run_in_threadpool(_node, context, node_id)
        await run_in_threadpool(store.writing(node_records.uncordon), node_id)
        return _node_response(await run_in_threadpool(_node, context, node_id))

    @router.post(
        "/{node}/preemption-notice",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        status_code=202,
        response_model=Page[NodeView],
        summary="Announce that a node will be taken away",
        openapi_extra=body_of("NoticeRequest", JSON_TYPES, required=False),
    )
    async def announce_preemption(request: Request, node: NodeOrAddress) -> Response:
        """Hooks of a cloud or of Kubernetes call this: they know the machine by its address. All live nodes at the
        address are drained before the deadline; jobs leave at a step boundary and lose no step. The answer is these
        nodes."""
        notice = await _request(request, NoticeRequest)
        nodes = await run_in_threadpool(nodes_of, context)
        found = [one.node_id for one in nodes if one.alive and node in (one.node_id, one.ip)]
        if not found:
            raise ProblemError(Kind.NODE_NOT_FOUND, f"There is no live node {node}; GET /v1/nodes lists them.")
        now = context.clock()
        deadline = now + notice.deadline_s if notice.deadline_at is None else notice.deadline_at
        for node_id in found:
            await run_in_threadpool(
                store.writing(node_records.request_drain),
                node_id,
                reason=notice.reason,
                deadline=deadline,
                now=now,
                source=DrainSource.NOTICE,
            )
        after = await run_in_threadpool(nodes_of, context)
        page = Page[NodeView](items=tuple(one for one in after if one.node_id in found))
        return Response(page.model_dump_json(), 202, media_type="application/json")

    return router


def nodes_of(context: Context) -> tuple[NodeView, ...]:
    """Return the nodes as the control loop saw them last, with the current drains and cordons."""
    with context.store.read() as tx:
        nodes = with_drains(context.cluster.snapshot().nodes, node_records.drains(tx))
        num_workers, cordons = histories.read_workers_by_node(tx), node_records.cordons(tx)
        of_clusters = {one.name: cordon_of_cluster(one.name, one.cordon) for one in cluster_links.entries(tx)}

    def cordon_of(node: Node) -> Cordon | None:
        return cordons.get(node.node_id) or of_clusters.get(node.cluster)

    return tuple(
        NodeView.of(node.model_copy(update={"cordon": cordon_of(node)}), num_workers=num_workers[node.node_id])
        for node in nodes
    )


def _node(context: Context, node_id: str) -> NodeView:
    for node in nodes_of(context):
        if node.node_id == node_id:
            return node
    raise ProblemError(Kind.NODE_NOT_FOUND, f"There is no node {node_id}; GET /v1/nodes lists them.")


async def _request(request: Request, model: type[M]) -> M:
    """Read the body, which may be missing."""
    if "content-type" not in request.headers:
        await require_no_body(request)
        return model()
    return await read_model(request, model)


def _node_response(node: NodeView, status: int = 200) -> Response:
    return Response(node.model_dump_json(), status, media_type="application/json")
