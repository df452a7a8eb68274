"""Routes for operators about the clusters that have joined: list, show, cordon, label, remove; and their tokens.

The store holds cordons and labels, so they outlive this process. The control loop reads them in each pass.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.concurrency import run_in_threadpool

from shoal_api.http.context import Context
from shoal_api.http.documents import PATCH_TYPES, body
from shoal_api.http.json_router import AppContext, Caller, JsonRouter, Reading, Writing
from shoal_api.http.parameters import ClusterName
from shoal_api.http.problems import InvalidRequest
from shoal_service.access_views import ClusterTokenRequest, NewToken, TokenView
from shoal_service.core.access import Permission
from shoal_service.fleet_views import ClusterPatch, ClusterSummary, CordonRequest
from shoal_service.store import cluster_links
from shoal_service.store.database import Transaction
from shoal_service.store.errors import ClusterConflict, ClusterNotFound
from shoal_service.views import Page

CordonBody = Annotated[CordonRequest, body(CordonRequest, {"reason": "a fan is loud"}, required=False)]
_LABELS = {"labels": {"region": "eu"}}
_TOKEN = {"name": "gateway-of-east", "expires_in_s": 31536000}

router = JsonRouter("/v1/clusters", "clusters")


@router.route("GET", Permission.CLUSTER_READ, "List the clusters")
def list_clusters(tx: Reading, context: AppContext) -> Page[ClusterSummary]:
    """Lists the clusters that have joined, and those for which a token was made; also those that are away."""
    return Page[ClusterSummary](items=list_joined(tx, context))


@router.route("GET /{cluster}", Permission.CLUSTER_READ, "Show a cluster", raises=[ClusterNotFound])
def show_cluster(tx: Reading, context: AppContext, cluster: ClusterName) -> ClusterSummary:
    """Returns whether it answers, what it has, and how many jobs run there."""
    return _find(tx, context, cluster)


@router.route("PATCH /{cluster}", Permission.CLUSTER_CHANGE, "Label a cluster", raises=[ClusterNotFound])
def label_cluster(
    tx: Writing,
    context: AppContext,
    cluster: ClusterName,
    patch: Annotated[ClusterPatch, body(ClusterPatch, _LABELS, media_types=PATCH_TYPES)],
) -> ClusterSummary:
    """Its labels are added to those of its nodes, for `worker.selector`; a node's own take precedence."""
    try:
        cluster_links.label(tx, cluster, patch.labels)
    except ValueError as error:
        raise InvalidRequest(f"labels: {error}") from None
    return _find(tx, context, cluster)


@router.route(
    "DELETE /{cluster}",
    Permission.CLUSTER_CHANGE,
    "Remove a cluster",
    status=204,
    raises=[ClusterNotFound, ClusterConflict],
)
async def remove_cluster(
    context: AppContext,
    cluster: ClusterName,
    force: Annotated[
        bool, Query(description="Although jobs have attempts there. Only once its gateway is gone.")
    ] = False,
) -> None:
    """Its tokens are revoked, so its gateway ends. It may join again, with a new token."""
    remove = context.store.writing(cluster_links.remove)
    await run_in_threadpool(remove, cluster, force=force, now=context.clock())
    context.authenticator.forget()


@router.route(
    "POST /{cluster}/cordon", Permission.CLUSTER_CHANGE, "Cordon a cluster", status=202, raises=[ClusterNotFound]
)
def cordon_cluster(tx: Writing, context: AppContext, cluster: ClusterName, cordon: CordonBody) -> ClusterSummary:
    """No job starts there, and no worker is added; those that are there stay. A repeated request replaces the
    reason."""
    cluster_links.cordon(tx, cluster, reason=cordon.reason, now=context.clock())
    return _find(tx, context, cluster)


@router.route(
    "DELETE /{cluster}/cordon",
    Permission.CLUSTER_CHANGE,
    "Start jobs in a cordoned cluster again",
    raises=[ClusterNotFound],
)
def uncordon_cluster(tx: Writing, context: AppContext, cluster: ClusterName) -> ClusterSummary:
    """Does nothing to a cluster that is not cordoned. Cordons of its nodes stay."""
    cluster_links.uncordon(tx, cluster)
    return _find(tx, context, cluster)


@router.route(
    "POST /{cluster}/tokens", Permission.TOKENS_MANAGE, "Make a token for the gateway of a cluster", status=201
)
def create_token(
    tx: Writing,
    context: AppContext,
    caller: Caller,
    cluster: ClusterName,
    token: Annotated[ClusterTokenRequest, body(ClusterTokenRequest, _TOKEN)],
) -> NewToken:
    """The token is for `shoal join`. Only this answer has it; it is listed and revoked as other tokens are."""
    return cluster_links.create_token(tx, cluster, token, by=caller.name, now=context.clock())


@router.route(
    "GET /{cluster}/tokens", Permission.TOKENS_MANAGE, "List the tokens of a cluster", raises=[ClusterNotFound]
)
def list_tokens(tx: Reading, cluster: ClusterName) -> Page[TokenView]:
    """Lists tokens newest first, with those that are expired or revoked, without their secrets."""
    return Page[TokenView](items=tuple(cluster_links.cluster_tokens(tx, cluster)))


def list_joined(tx: Transaction, context: Context) -> tuple[ClusterSummary, ...]:
    """Return the clusters as the control loop saw them last, with the present labels and cordons; the service's own
    comes first."""
    entries, num_jobs = {entry.name: entry for entry in cluster_links.entries(tx)}, cluster_links.num_jobs(tx)
    seen = [cluster for cluster in context.cluster.snapshot().clusters if cluster.name in entries]
    unseen = [
        ClusterSummary(name=name, address=entry.address, why_away="its gateway has not reported yet")
        for name, entry in entries.items()
        if name not in {cluster.name for cluster in seen}
    ]
    return tuple(
        cluster.model_copy(
            update={
                "labels": dict(entries[cluster.name].labels),
                "cordon": entries[cluster.name].cordon,
                "num_jobs": num_jobs[cluster.name],
            }
        )
        for cluster in (*seen, *unseen)
    )


def _find(tx: Transaction, context: Context, name: str) -> ClusterSummary:
    """Raises ClusterNotFound."""
    for cluster in list_joined(tx, context):
        if cluster.name == name:
            return cluster
    raise ClusterNotFound(name)
