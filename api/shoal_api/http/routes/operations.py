"""Routes for operators: the cluster, webhooks, health, readiness, metrics, problem types; the nodes (list, show, drain,
cordon, and undo both; the notice of a cloud); the clusters that have joined, and their tokens.

The store holds drains, cordons and labels, so they outlive this process. The control loop passes them to the scheduler
and to every supervisor within two seconds. The gateways of clusters have routes of their own, in `clusters.py`.

Also the queue, and projects and users with their quotas. The scheduler explains the queue in each pass, and follows a
change of a quota in the next one; limits are also checked when a job is submitted. There are no accounts: a job's user
is what its spec names.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.answers import Health, ProblemType, Readiness
from shoal_api.http.access.needs import PUBLIC, require_visible
from shoal_api.http.context import Context
from shoal_api.http.json_router import (
    JOB_ID,
    USER_NAME,
    AppContext,
    Caller,
    ClusterName,
    JsonRouter,
    ProjectName,
    Reading,
    Writing,
    json_response,
)
from shoal_api.http.problems import InvalidRequest, NodeNotFound, NotReady
from shoal_api.http.request_bodies import PATCH_TYPES, body
from shoal_service.access_views import ClusterTokenRequest, NewToken, TokenView
from shoal_service.core.access import Permission
from shoal_service.core.nodes import Cordon, DrainSource, Node, cordon_of_cluster, with_drains
from shoal_service.fleet_views import (
    ClusterPatch,
    ClusterSummary,
    ClusterView,
    CordonRequest,
    DrainRequest,
    NodeView,
    NoticeRequest,
    ProjectRules,
    ProjectView,
    QueueView,
    UserRules,
    UserView,
)
from shoal_service.problems import ProblemKind, problem_kinds
from shoal_service.store import (
    ClusterConflict,
    ClusterNotFound,
    Conflict,
    JobNotFound,
    NotFound,
    ProjectConflict,
    ProjectNotFound,
    StoreUnavailable,
    Transaction,
    UserNotFound,
    cluster_links,
    histories,
    node_records,
    queueing,
    webhook_lanes,
)
from shoal_service.telemetry.text_format import compress
from shoal_service.views import Page, WebhookView
from shoal_workers.contract.checks.spec_errors import SpecProblem

_GZIP = {"Content-Encoding": "gzip"}
_NOT_RAY = (
    "this is a Shoal server, not Ray's dashboard: submit the program with `shoal submit train.py --workers 2` instead "
    "of `ray job submit`; see docs/porting.md"
)


router = JsonRouter("", "operations")


@router.route("GET /v1/cluster", Permission.CLUSTER_READ, "The cluster as the scheduler sees it")
def cluster(context: AppContext) -> ClusterView:
    """Returns nodes, free capacity, and which control plane owns the jobs."""
    return context.cluster.snapshot()


@router.route("GET /v1/webhooks", Permission.JOBS_READ, "What webhooks have delivered", raises=[JobNotFound])
async def webhooks(
    request: Request,
    context: AppContext,
    caller: Caller,
    job: Annotated[str | None, Query(pattern=JOB_ID, description="Only the hooks that concern this job.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="The most hooks of specs that are listed.")] = 100,
) -> Page[WebhookView]:
    """With `job`, lists the hooks of the settings and of the job's spec, for this job. Without it, lists the hooks
    of the settings over all jobs, then the hooks of specs whose events wait after a failed attempt, those that wait
    longest first."""
    if job is not None:
        await require_visible(request, job)
    read = context.store.reading(webhook_lanes.read_views)
    return Page[WebhookView](items=tuple(await run_in_threadpool(read, job, limit=limit, visible=caller.projects)))


@router.route("GET /healthz", PUBLIC, "The process is alive")
async def healthz(context: AppContext) -> Health:
    """Checks nothing else. Restart the process if this does not answer."""
    return Health(version=context.version)


@router.route("GET /readyz", PUBLIC, "The service can accept and run jobs", raises=[NotReady])
def readyz(context: AppContext) -> Readiness:
    """The store answers and the cluster is connected. Shows the owner of the lease, and warnings such as nodes that
    are away."""
    wrong = []
    lease = None
    try:
        context.store.ping()
        lease = context.store.read_lease()
    except StoreUnavailable as error:
        wrong.append(SpecProblem(path="store", message=str(error)))
    view = context.cluster.snapshot()
    if not view.connected:
        wrong.append(SpecProblem(path="cluster", message=_explain_unreachable(view.address)))
    if wrong:
        raise NotReady("Not ready; see errors.", tuple(wrong))
    return Readiness(
        store="ok",
        cluster=view.address,
        owner=lease.owner if lease else "",
        epoch=lease.epoch if lease else 0,
        warnings=(*context.warnings(), *_describe_unreachable_clusters(view)),
    )


@router.route(
    "GET /metrics",
    Permission.METRICS_READ,
    "Metrics for Prometheus",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(request: Request, context: AppContext, caller: Caller) -> Response:
    """Returns OpenMetrics, with exemplars, to a scraper that prefers it, otherwise the text format; with gzip to
    one that accepts it. The metrics are read from the store at the time of the scrape. A token that is bound to
    projects gets what is about their jobs and about them."""
    projects = () if caller.projects is None else (caller.projects,)
    text, media_type = context.scrape(request.headers.get("accept", ""), *projects)
    headers = {"Content-Type": media_type, "Vary": "Accept, Accept-Encoding"}
    small = compress(text, request.headers.get("accept-encoding", ""))
    return Response(text, headers=headers) if small is None else Response(small, headers=headers | _GZIP)


@router.route("GET /api/version", PUBLIC, "", include_in_schema=False)
async def ray_version() -> dict[str, str]:
    """Answer the client of Ray's jobs, which was given the address of this service: `ray job submit --address URL`
    asks for the version first. It shows the value of this key, whatever it is, when it is not a version."""
    return {"ray_version": _NOT_RAY}


@router.route("GET /problems", PUBLIC, "Every problem type of this API")
async def problems() -> list[ProblemType]:
    """The `type` of every problem document is one of these."""
    return [_describe(kind) for kind in problem_kinds().values()]


@router.route("GET /problems/{code}", PUBLIC, "One problem type", raises=[NotFound])
async def problem(
    code: Annotated[str, Path(max_length=64, description="The last part of a `type`.")],
) -> ProblemType:
    """Returns the document that the `type` of a problem refers to."""
    kind = problem_kinds().get(code)
    if kind is None:
        raise NotFound(f"There is no problem type {code[:64]!r}; GET /problems lists them.")
    return _describe(kind)


def _describe(kind: ProblemKind) -> ProblemType:
    return ProblemType(type=kind.uri, title=kind.title, status=kind.status, meaning=kind.meaning)


def _explain_unreachable(address: str) -> str:
    if not address:
        return "No Ray cluster is connected yet: it is still starting, or cannot start. The server's log says which."
    return f"The head of the Ray cluster at {address} does not answer. Jobs train on; if it has ended, start it again."


def _describe_unreachable_clusters(view: ClusterView) -> tuple[str, ...]:
    """Return the clusters that have joined and do not answer, while others do."""
    away = [cluster for cluster in view.clusters if not cluster.connected and cluster.silent_s is not None]
    return tuple(f"Cluster {cluster.name} is unreachable: {cluster.why_away}. Its jobs train on." for cluster in away)


NodeId = Annotated[
    str, Path(pattern=r"^[0-9a-f]{1,64}$", description="Ray's id of the node, in full length, from GET /v1/nodes.")
]
NodeOrAddress = Annotated[
    str, Path(pattern=r"^[0-9A-Za-z.:_-]{1,64}$", description="Ray's id of the node in full length, or its address.")
]
_DRAIN = {"reason": "kernel update", "deadline_s": 600}
_NOTICE = {"deadline_s": 120, "reason": "spot instance reclaimed"}

CordonBody = Annotated[CordonRequest, body(CordonRequest, {"reason": "a fan is loud"}, required=False)]

node_router = JsonRouter("/v1", "operations")


@node_router.route("GET /nodes", Permission.CLUSTER_READ, "List the nodes of the cluster")
def list_nodes(tx: Reading, context: AppContext) -> Page[NodeView]:
    """Lists all nodes, also dead ones, with their resources, drains and probations."""
    return Page[NodeView](items=list_seen(tx, context))


@node_router.route("GET /nodes/{node_id}", Permission.CLUSTER_READ, "Show a node", raises=[NodeNotFound])
def show_node(tx: Reading, context: AppContext, node_id: NodeId) -> NodeView:
    """Returns one node of the cluster."""
    return _find_node(tx, context, node_id)


@node_router.route(
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
    if not _find_node(tx, context, node_id).alive:
        raise Conflict(f"Node {node_id} is dead and cannot be drained.")
    now = context.clock()
    deadline = None if drain.deadline_s is None else now + drain.deadline_s
    node_records.request_drain(tx, node_id, reason=drain.reason, deadline=deadline, now=now)
    return _find_node(tx, context, node_id)


@node_router.route(
    "DELETE /nodes/{node_id}/drain",
    Permission.CLUSTER_CHANGE,
    "Use a drained node again",
    raises=[NodeNotFound, Conflict],
)
def undo_drain(tx: Writing, context: AppContext, node_id: NodeId) -> NodeView:
    """Does nothing to a node that is not drained. A drain that Ray announced cannot be undone."""
    drain = _find_node(tx, context, node_id).drain
    if drain is not None and drain.source is DrainSource.RAY:
        raise Conflict(f"Ray drains node {node_id}, and Shoal cannot undo that.")
    node_records.undo_drain(tx, node_id)
    return _find_node(tx, context, node_id)


@node_router.route(
    "POST /nodes/{node_id}/cordon",
    Permission.CLUSTER_CHANGE,
    "Cordon a node",
    status=202,
    raises=[NodeNotFound, Conflict],
)
def cordon_node(tx: Writing, context: AppContext, node_id: NodeId, cordon: CordonBody) -> NodeView:
    """No new worker is placed on the node; those that are there stay. A repeated request replaces the reason."""
    if not _find_node(tx, context, node_id).alive:
        raise Conflict(f"Node {node_id} is dead and cannot be cordoned.")
    node_records.cordon(tx, node_id, reason=cordon.reason, now=context.clock())
    return _find_node(tx, context, node_id)


@node_router.route(
    "DELETE /nodes/{node_id}/cordon",
    Permission.CLUSTER_CHANGE,
    "Place workers on a cordoned node again",
    raises=[NodeNotFound, Conflict],
)
def undo_cordon(tx: Writing, context: AppContext, node_id: NodeId) -> NodeView:
    """Does nothing to a node that is not cordoned. A node stays cordoned while its cluster is."""
    _find_node(tx, context, node_id)
    node_records.uncordon(tx, node_id)
    return _find_node(tx, context, node_id)


@node_router.route(
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
    of_clusters = {entry.name: cordon_of_cluster(entry.name, entry.cordon) for entry in cluster_links.list_clusters(tx)}

    def find_cordon(node: Node) -> Cordon | None:
        return cordons.get(node.node_id) or of_clusters.get(node.cluster)

    return tuple(
        NodeView.of(node.model_copy(update={"cordon": find_cordon(node)}), num_workers=num_workers[node.node_id])
        for node in nodes
    )


def _find_node(tx: Transaction, context: Context, node_id: str) -> NodeView:
    """Raises NodeNotFound."""
    for node in list_seen(tx, context):
        if node.node_id == node_id:
            return node
    raise NodeNotFound(f"There is no node {node_id}; GET /v1/nodes lists them.")


_LABELS = {"labels": {"region": "eu"}}
_TOKEN = {"name": "gateway-of-east", "expires_in_s": 31536000}

cluster_router = JsonRouter("/v1/clusters", "clusters")


@cluster_router.route("GET", Permission.CLUSTER_READ, "List the clusters")
def list_clusters(tx: Reading, context: AppContext) -> Page[ClusterSummary]:
    """Lists the clusters that have joined, and those for which a token was made; also those that are away."""
    return Page[ClusterSummary](items=list_joined(tx, context))


@cluster_router.route("GET /{cluster}", Permission.CLUSTER_READ, "Show a cluster", raises=[ClusterNotFound])
def show_cluster(tx: Reading, context: AppContext, cluster: ClusterName) -> ClusterSummary:
    """Returns whether it answers, what it has, and how many jobs run there."""
    return _find_cluster(tx, context, cluster)


@cluster_router.route("PATCH /{cluster}", Permission.CLUSTER_CHANGE, "Label a cluster", raises=[ClusterNotFound])
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
    return _find_cluster(tx, context, cluster)


@cluster_router.route(
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


@cluster_router.route(
    "POST /{cluster}/cordon", Permission.CLUSTER_CHANGE, "Cordon a cluster", status=202, raises=[ClusterNotFound]
)
def cordon_cluster(tx: Writing, context: AppContext, cluster: ClusterName, cordon: CordonBody) -> ClusterSummary:
    """No job starts there, and no worker is added; those that are there stay. A repeated request replaces the
    reason."""
    cluster_links.cordon(tx, cluster, reason=cordon.reason, now=context.clock())
    return _find_cluster(tx, context, cluster)


@cluster_router.route(
    "DELETE /{cluster}/cordon",
    Permission.CLUSTER_CHANGE,
    "Start jobs in a cordoned cluster again",
    raises=[ClusterNotFound],
)
def uncordon_cluster(tx: Writing, context: AppContext, cluster: ClusterName) -> ClusterSummary:
    """Does nothing to a cluster that is not cordoned. Cordons of its nodes stay."""
    cluster_links.uncordon(tx, cluster)
    return _find_cluster(tx, context, cluster)


@cluster_router.route(
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


@cluster_router.route(
    "GET /{cluster}/tokens", Permission.TOKENS_MANAGE, "List the tokens of a cluster", raises=[ClusterNotFound]
)
def list_tokens(tx: Reading, cluster: ClusterName) -> Page[TokenView]:
    """Lists tokens newest first, with those that are expired or revoked, without their secrets."""
    return Page[TokenView](items=tuple(cluster_links.list_tokens(tx, cluster)))


def list_joined(tx: Transaction, context: Context) -> tuple[ClusterSummary, ...]:
    """Return the clusters as the control loop saw them last, with the present labels and cordons; the service's own
    comes first."""
    entries, num_jobs = {entry.name: entry for entry in cluster_links.list_clusters(tx)}, cluster_links.count_jobs(tx)
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


def _find_cluster(tx: Transaction, context: Context, name: str) -> ClusterSummary:
    """Raises ClusterNotFound."""
    for cluster in list_joined(tx, context):
        if cluster.name == name:
            return cluster
    raise ClusterNotFound(name)


UserName = Annotated[
    str,
    Path(
        pattern=USER_NAME,
        description="At most 63 letters, digits, and inner dashes, dots, underscores and at signs.",
    ),
]
ProjectBody = Annotated[ProjectRules, body(ProjectRules, {"weight": 2.0})]

quota_router = JsonRouter("/v1", "scheduling")


@quota_router.route("GET /queue", Permission.JOBS_READ, "Show the queue")
def show_queue(
    tx: Reading,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Largest number of jobs.")] = 1000,
) -> QueueView:
    """Returns the queued jobs in the order in which they would start, each with the reason why it waits, the jobs
    that hold what it waits for, and its expected start; running jobs with fewer workers than they may have, and
    why; and what each project uses."""
    return queueing.view(tx, limit=limit, visible=caller.projects)


@quota_router.route("GET /projects", Permission.JOBS_READ, "List the projects")
def list_projects(tx: Reading, caller: Caller) -> Page[ProjectView]:
    """Lists the projects that are defined, and those that have jobs, ended ones too, with their quotas and what
    they use."""
    return Page[ProjectView](items=tuple(queueing.project_views(tx, caller.projects)))


@quota_router.route("GET /projects/{name}", Permission.JOBS_READ, "Show a project", raises=[ProjectNotFound])
def show_project(tx: Reading, caller: Caller, name: ProjectName) -> ProjectView:
    """Returns its quotas, and what its jobs use."""
    if not caller.sees(name):
        raise ProjectNotFound(name)
    return queueing.project_view(tx, name)


@quota_router.route(
    "PUT /projects/{name}",
    Permission.QUOTAS_CHANGE,
    "Set the quotas of a project",
    answer=ProjectView,
    responses={201: {"model": ProjectView, "description": "The project was not defined before."}},
    raises=[ProjectNotFound, ProjectConflict],
)
def put_project(tx: Writing, name: ProjectName, rules: ProjectBody) -> Response:
    """Replaces all quotas: a key that is left out gets its default. Running jobs follow by shrinking; nothing is
    ended."""
    project, is_new = queueing.put_project(tx, name, rules)
    return json_response(project, 201 if is_new else 200)


@quota_router.route(
    "DELETE /projects/{name}",
    Permission.QUOTAS_CHANGE,
    "Delete the quotas of a project",
    status=204,
    raises=[ProjectNotFound, ProjectConflict],
)
def delete_project(tx: Writing, name: ProjectName) -> None:
    """The rules of the project `default` then apply to its jobs. A project that is a parent cannot be deleted."""
    queueing.remove_project(tx, name)


@quota_router.route("GET /users", Permission.USERS_READ, "List the users")
def list_users(tx: Reading) -> Page[UserView]:
    """Lists the users with limits of their own, and those with queued jobs or workers. The limits of the user
    `default` apply to each user without own limits."""
    return Page[UserView](items=tuple(queueing.user_views(tx)))


@quota_router.route("GET /users/{name}", Permission.USERS_READ, "Show a user", raises=[UserNotFound])
def show_user(tx: Reading, name: UserName) -> UserView:
    """Returns the limits that apply to the user, and what the user has."""
    return queueing.user_view(tx, name)


@quota_router.route(
    "PUT /users/{name}",
    Permission.QUOTAS_CHANGE,
    "Set the limits of a user",
    answer=UserView,
    responses={201: {"model": UserView, "description": "The user had no limits before."}},
    raises=[UserNotFound],
)
def put_user(tx: Writing, name: UserName, rules: Annotated[UserRules, body(UserRules, {"max_queued": 20})]) -> Response:
    """Replaces both limits: a key that is left out is no limit. Running jobs go on."""
    user, is_new = queueing.put_user(tx, name, rules)
    return json_response(user, 201 if is_new else 200)


@quota_router.route(
    "DELETE /users/{name}",
    Permission.QUOTAS_CHANGE,
    "Delete the limits of a user",
    status=204,
    raises=[UserNotFound],
)
def delete_user(tx: Writing, name: UserName) -> None:
    """The limits of the user `default` then apply."""
    queueing.remove_user(tx, name)
