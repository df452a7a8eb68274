"""Routes for the nodes of the cluster: list, show, drain, undo a drain.

The store holds the drains, so they outlive this process. The control loop passes them to the scheduler and to every
supervisor within two seconds.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_body, read_model
from shoal_api.http.openapi import body_of
from shoal_api.http.problem_types import Kind
from shoal_api.http.problems import ProblemError
from shoal_service.core.nodes import DrainSource, with_drains
from shoal_service.views import DrainRequest, NodeView, Page

NodeId = Annotated[
    str, Path(pattern=r"^[0-9a-f]{1,64}$", description="Ray's id of the node, in full length, from GET /v1/nodes.")
]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/nodes", tags=["operations"])
    store = context.store

    @router.get("", response_model=Page[NodeView], summary="List the nodes of the cluster")
    async def list_nodes() -> Response:
        """All nodes, also dead ones, with their resources, drains and probations."""
        page = Page[NodeView](items=await run_in_threadpool(_nodes, context))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get("/{node_id}", response_model=NodeView, summary="Show a node")
    async def show_node(node_id: NodeId) -> Response:
        """One node of the cluster."""
        return _node_response(await run_in_threadpool(_node, context, node_id))

    @router.post(
        "/{node_id}/drain",
        status_code=202,
        response_model=NodeView,
        summary="Drain a node",
        openapi_extra=body_of("DrainRequest", JSON_TYPES, required=False),
    )
    async def drain_node(request: Request, node_id: NodeId) -> Response:
        """Jobs leave the node at their next step boundary and lose no step; no new worker is placed there. With
        `deadline_s`, they leave before that time. A repeated request replaces reason and deadline."""
        drain = await _drain_request(request)
        node = await run_in_threadpool(_node, context, node_id)
        if not node.alive:
            raise ProblemError(Kind.REQUEST_CONFLICT, f"Node {node_id} is dead and cannot be drained.")
        now = context.clock()
        deadline = None if drain.deadline_s is None else now + drain.deadline_s
        await run_in_threadpool(store.drain_node, node_id, reason=drain.reason, deadline=deadline, now=now)
        return _node_response(await run_in_threadpool(_node, context, node_id), 202)

    @router.delete("/{node_id}/drain", response_model=NodeView, summary="Use a drained node again")
    async def undo_drain(node_id: NodeId) -> Response:
        """Does nothing to a node that is not drained. A drain that Ray announced cannot be undone."""
        node = await run_in_threadpool(_node, context, node_id)
        if node.drain is not None and node.drain.source is not DrainSource.API:
            raise ProblemError(Kind.REQUEST_CONFLICT, f"Ray drains node {node_id}, and Shoal cannot undo that.")
        await run_in_threadpool(store.undo_drain, node_id)
        return _node_response(await run_in_threadpool(_node, context, node_id))

    return router


def _nodes(context: Context) -> tuple[NodeView, ...]:
    """The nodes as the control loop saw them last, with the current drains."""
    nodes = with_drains(context.cluster.snapshot().nodes, context.store.drains())
    num_workers = context.store.workers_by_node()
    return tuple(NodeView.of(node, num_workers[node.node_id]) for node in nodes)


def _node(context: Context, node_id: str) -> NodeView:
    for node in _nodes(context):
        if node.node_id == node_id:
            return node
    raise ProblemError(Kind.NODE_NOT_FOUND, f"There is no node {node_id}; GET /v1/nodes lists them.")


async def _drain_request(request: Request) -> DrainRequest:
    if "content-type" not in request.headers:
        await read_body(request, 0)
        return DrainRequest()
    return await read_model(request, DrainRequest)


def _node_response(node: NodeView, status: int = 200) -> Response:
    return Response(node.model_dump_json(), status, media_type="application/json")
