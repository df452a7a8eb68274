"""Routes for operators: cluster, webhooks, health, readiness, metrics, problem types."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.answers import Health, ProblemType, Readiness
from shoal_api.http.access.needs import PUBLIC, require_visible
from shoal_api.http.json_router import AppContext, Caller, JsonRouter
from shoal_api.http.parameters import JOB_ID
from shoal_api.http.problems import NotReady
from shoal_service.core.access import Permission
from shoal_service.fleet_views import ClusterView
from shoal_service.problems import ProblemKind, problem_kinds
from shoal_service.store import JobNotFound, NotFound, StoreUnavailable, webhook_lanes
from shoal_service.telemetry.text_format import compressed
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
    read = context.store.reading(webhook_lanes.views)
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
        lease = context.store.current_lease()
    except StoreUnavailable as error:
        wrong.append(SpecProblem(path="store", message=str(error)))
    view = context.cluster.snapshot()
    if not view.connected:
        wrong.append(SpecProblem(path="cluster", message=_away(view.address)))
    if wrong:
        raise NotReady("Not ready; see errors.", tuple(wrong))
    return Readiness(
        store="ok",
        cluster=view.address,
        owner=lease.owner if lease else "",
        epoch=lease.epoch if lease else 0,
        warnings=(*context.warnings(), *_clusters_away(view)),
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
    small = compressed(text, request.headers.get("accept-encoding", ""))
    return Response(text, headers=headers) if small is None else Response(small, headers=headers | _GZIP)


@router.route("GET /api/version", PUBLIC, "", include_in_schema=False)
async def ray_version() -> dict[str, str]:
    """Answer the client of Ray's jobs, which was given the address of this service: `ray job submit --address URL`
    asks for the version first. It shows the value of this key, whatever it is, when it is not a version."""
    return {"ray_version": _NOT_RAY}


@router.route("GET /problems", PUBLIC, "Every problem type of this API")
async def problems() -> list[ProblemType]:
    """The `type` of every problem document is one of these."""
    return [_described(kind) for kind in problem_kinds().values()]


@router.route("GET /problems/{code}", PUBLIC, "One problem type", raises=[NotFound])
async def problem(
    code: Annotated[str, Path(max_length=64, description="The last part of a `type`.")],
) -> ProblemType:
    """Returns the document that the `type` of a problem refers to."""
    kind = problem_kinds().get(code)
    if kind is None:
        raise NotFound(f"There is no problem type {code[:64]!r}; GET /problems lists them.")
    return _described(kind)


def _described(kind: ProblemKind) -> ProblemType:
    return ProblemType(type=kind.uri, title=kind.title, status=kind.status, meaning=kind.meaning)


def _away(address: str) -> str:
    if not address:
        return "No Ray cluster is connected yet: it is still starting, or cannot start. The server's log says which."
    return f"The head of the Ray cluster at {address} does not answer. Jobs train on; if it has ended, start it again."


def _clusters_away(view: ClusterView) -> tuple[str, ...]:
    """Return the clusters that have joined and do not answer, while others do."""
    away = [cluster for cluster in view.clusters if not cluster.connected and cluster.silent_s is not None]
    return tuple(f"Cluster {cluster.name} is away: {cluster.why_away}. Jobs there train on." for cluster in away)
