"""Routes for operators about the clusters that have joined: list, show, cordon, label, remove; and their tokens.

The store holds cordons and labels, so they outlive this process. The control loop reads them in each pass.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import needs
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, PATCH_TYPES, read_model, require_no_body
from shoal_api.http.openapi import body_of
from shoal_api.http.problems import Kind, ProblemError
from shoal_api.http.routes.clusters import ClusterName
from shoal_service.access_views import ClusterTokenRequest, NewToken, TokenView
from shoal_service.core.access import Permission
from shoal_service.fleet_views import ClusterPatch, ClusterSummary, CordonRequest
from shoal_service.store import cluster_links
from shoal_service.store.errors import ClusterNotFound
from shoal_service.views import Page


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/clusters", tags=["clusters"])
    store = context.store

    @router.get(
        "",
        dependencies=[needs(Permission.CLUSTER_READ)],
        response_model=Page[ClusterSummary],
        summary="List the clusters",
    )
    async def list_clusters() -> Response:
        """Lists the clusters that have joined, and those for which a token was made; also those that are away."""
        page = Page[ClusterSummary](items=await run_in_threadpool(clusters_of, context))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/{cluster}",
        dependencies=[needs(Permission.CLUSTER_READ)],
        response_model=ClusterSummary,
        summary="Show a cluster",
    )
    async def show_cluster(cluster: ClusterName) -> Response:
        """Returns whether it answers, what it has, and how many jobs run there."""
        return await run_in_threadpool(_response, context, cluster)

    @router.patch(
        "/{cluster}",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        response_model=ClusterSummary,
        summary="Label a cluster",
        openapi_extra=body_of("ClusterPatch", PATCH_TYPES),
    )
    async def label_cluster(request: Request, cluster: ClusterName) -> Response:
        """Its labels are added to those of its nodes, for `worker.selector`; a node's own take precedence."""
        patch = await read_model(request, ClusterPatch, PATCH_TYPES)
        try:
            await run_in_threadpool(store.writing(cluster_links.label), cluster, patch.labels)
        except ValueError as error:
            raise ProblemError(Kind.INVALID_REQUEST, f"labels: {error}") from None
        return await run_in_threadpool(_response, context, cluster)

    @router.delete(
        "/{cluster}",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        status_code=204,
        response_class=Response,
        summary="Remove a cluster",
    )
    async def remove_cluster(
        cluster: ClusterName,
        force: Annotated[
            bool, Query(description="Although jobs have attempts there. Only once its gateway is gone.")
        ] = False,
    ) -> Response:
        """Its tokens are revoked, so its gateway ends. It may join again, with a new token."""
        await run_in_threadpool(store.writing(cluster_links.remove), cluster, force=force, now=context.clock())
        context.authenticator.forget()
        return Response(status_code=204)

    @router.post(
        "/{cluster}/cordon",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        status_code=202,
        response_model=ClusterSummary,
        summary="Cordon a cluster",
        openapi_extra=body_of("CordonRequest", JSON_TYPES, required=False),
    )
    async def cordon_cluster(request: Request, cluster: ClusterName) -> Response:
        """No job starts there, and no worker is added; those that are there stay. A repeated request replaces the
        reason."""
        if "content-type" in request.headers:
            cordon = await read_model(request, CordonRequest)
        else:
            await require_no_body(request)
            cordon = CordonRequest()
        await run_in_threadpool(store.writing(cluster_links.cordon), cluster, reason=cordon.reason, now=context.clock())
        return await run_in_threadpool(_response, context, cluster, 202)

    @router.delete(
        "/{cluster}/cordon",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        response_model=ClusterSummary,
        summary="Start jobs in a cordoned cluster again",
    )
    async def uncordon_cluster(cluster: ClusterName) -> Response:
        """Does nothing to a cluster that is not cordoned. Cordons of its nodes stay."""
        await run_in_threadpool(store.writing(cluster_links.uncordon), cluster)
        return await run_in_threadpool(_response, context, cluster)

    @router.post(
        "/{cluster}/tokens",
        dependencies=[needs(Permission.TOKENS_MANAGE)],
        status_code=201,
        response_model=NewToken,
        summary="Make a token for the gateway of a cluster",
        openapi_extra=body_of("ClusterTokenRequest", JSON_TYPES),
    )
    async def create_token(request: Request, cluster: ClusterName) -> Response:
        """The token is for `shoal join`. Only this answer has it; it is listed and revoked as other tokens are."""
        body = await read_model(request, ClusterTokenRequest)
        by = principal_of(request).name
        made = await run_in_threadpool(
            store.writing(cluster_links.create_token), cluster, body, by=by, now=context.clock()
        )
        return Response(made.model_dump_json(), 201, media_type="application/json")

    @router.get(
        "/{cluster}/tokens",
        dependencies=[needs(Permission.TOKENS_MANAGE)],
        response_model=Page[TokenView],
        summary="List the tokens of a cluster",
    )
    async def list_tokens(cluster: ClusterName) -> Response:
        """Lists tokens newest first, with those that are expired or revoked, without their secrets."""
        page = Page[TokenView](
            items=tuple(await run_in_threadpool(store.reading(cluster_links.cluster_tokens), cluster))
        )
        return Response(page.model_dump_json(), media_type="application/json")

    return router


def clusters_of(context: Context) -> tuple[ClusterSummary, ...]:
    """Return the clusters as the control loop saw them last, with the present labels and cordons; the service's own
    comes first."""
    with context.store.read() as tx:
        entries, num_jobs = {one.name: one for one in cluster_links.entries(tx)}, cluster_links.num_jobs(tx)
    seen = [one for one in context.cluster.snapshot().clusters if one.name in entries]
    unseen = [
        ClusterSummary(name=name, address=one.address, why_away="its gateway has not reported yet")
        for name, one in entries.items()
        if name not in {one.name for one in seen}
    ]
    return tuple(
        one.model_copy(
            update={
                "labels": dict(entries[one.name].labels),
                "cordon": entries[one.name].cordon,
                "num_jobs": num_jobs[one.name],
            }
        )
        for one in (*seen, *unseen)
    )


def _response(context: Context, cluster: str, status: int = 200) -> Response:
    """Return the cluster as an answer. Raises ClusterNotFound."""
    for one in clusters_of(context):
        if one.name == cluster:
            return Response(one.model_dump_json(), status, media_type="application/json")
    raise ClusterNotFound(cluster)
