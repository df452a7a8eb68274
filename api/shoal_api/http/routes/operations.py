"""Routes for operators: cluster, webhooks, health, readiness, metrics, problem types."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.answers import Health, ProblemType, Readiness
from shoal_api.http.access.needs import PUBLIC, needs, require_visible, visible_projects
from shoal_api.http.context import Context
from shoal_api.http.problems import BY_CODE, Kind, ProblemError
from shoal_service.core.access import Permission
from shoal_service.fleet_views import ClusterView
from shoal_service.store import webhook_lanes
from shoal_service.store.errors import StoreUnavailable
from shoal_service.telemetry.text_format import compressed
from shoal_service.views import Page, WebhookView
from shoal_workers.contract.checks.spec_errors import SpecProblem

_GZIP = {"Content-Encoding": "gzip"}
_NOT_RAY = (
    "this is a Shoal server, not Ray's dashboard: submit the program with `shoal submit train.py --workers 2` instead "
    "of `ray job submit`; see docs/porting.md"
)


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get(
        "/v1/cluster",
        dependencies=[needs(Permission.CLUSTER_READ)],
        response_model=ClusterView,
        summary="The cluster as the scheduler sees it",
    )
    async def cluster() -> Response:
        """Returns nodes, free capacity, and which control plane owns the jobs."""
        view = await run_in_threadpool(context.cluster.snapshot)
        return Response(view.model_dump_json(), media_type="application/json")

    @router.get(
        "/v1/webhooks",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[WebhookView],
        summary="What webhooks have delivered",
    )
    async def webhooks(
        request: Request,
        job: Annotated[
            str | None,
            Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", description="Only the hooks that concern this job."),
        ] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="The most hooks of specs that are listed.")] = 100,
    ) -> Response:
        """With `job`, lists the hooks of the settings and of the job's spec, for this job. Without it, lists the hooks
        of the settings over all jobs, then the hooks of specs whose events wait after a failed attempt, those that wait
        longest first."""
        if job is not None:
            await require_visible(request, job)
        found = await run_in_threadpool(
            context.store.reading(webhook_lanes.views), job, limit=limit, visible=visible_projects(request)
        )
        page = Page[WebhookView](items=tuple(found))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get("/healthz", dependencies=[PUBLIC], summary="The process is alive")
    async def healthz() -> Health:
        """Checks nothing else. Restart the process if this does not answer."""
        return Health(version=context.version)

    @router.get(
        "/readyz", dependencies=[PUBLIC], response_model=Readiness, summary="The service can accept and run jobs"
    )
    async def readyz() -> Readiness:
        """The store answers and the cluster is connected. Shows the owner of the lease, and warnings such as nodes that
        are away."""
        return await run_in_threadpool(_readiness, context)

    @router.get(
        "/metrics",
        dependencies=[needs(Permission.METRICS_READ)],
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics(request: Request) -> Response:
        """Returns OpenMetrics, with exemplars, to a scraper that prefers it, otherwise the text format; with gzip to
        one that accepts it. The metrics are read from the store at the time of the scrape. A token that is bound to
        projects gets what is about their jobs and about them."""
        visible = visible_projects(request)
        return await run_in_threadpool(_metrics, context, request, () if visible is None else (visible,))

    @router.get("/api/version", dependencies=[PUBLIC], include_in_schema=False)
    async def ray_version() -> dict[str, str]:
        """Answer the client of Ray's jobs, which was given the address of this service: `ray job submit --address URL`
        asks for the version first. It shows the value of this key, whatever it is, when it is not a version."""
        return {"ray_version": _NOT_RAY}

    @router.get("/problems", dependencies=[PUBLIC], summary="Every problem type of this API")
    async def problems() -> list[ProblemType]:
        """The `type` of every problem document is one of these."""
        return [kind.described() for kind in Kind]

    @router.get("/problems/{code}", dependencies=[PUBLIC], summary="One problem type")
    async def problem(
        code: Annotated[str, Path(max_length=64, description="The last part of a `type`.")],
    ) -> ProblemType:
        """Returns the document that the `type` of a problem refers to."""
        if code not in BY_CODE:
            raise ProblemError(Kind.NOT_FOUND, f"There is no problem type {code[:64]!r}; GET /problems lists them.")
        return BY_CODE[code].described()

    return router


def _metrics(context: Context, request: Request, of_whom: tuple[Collection[str], ...]) -> Response:
    body, media_type = context.scrape(request.headers.get("accept", ""), *of_whom)
    headers = {"Content-Type": media_type, "Vary": "Accept, Accept-Encoding"}
    small = compressed(body, request.headers.get("accept-encoding", ""))
    return Response(body, headers=headers) if small is None else Response(small, headers=headers | _GZIP)


def _away(address: str) -> str:
    if not address:
        return "No Ray cluster is connected yet: it is still starting, or cannot start. The server's log says which."
    return f"The head of the Ray cluster at {address} does not answer. Jobs train on; if it has ended, start it again."


def _clusters_away(view: ClusterView) -> tuple[str, ...]:
    """Return the clusters that have joined and do not answer, while others do."""
    away = [one for one in view.clusters if not one.connected and one.silent_s is not None]
    return tuple(f"Cluster {one.name} is away: {one.why_away}. Jobs there train on." for one in away)


def _readiness(context: Context) -> Readiness:
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
        raise ProblemError(Kind.NOT_READY, "Not ready; see errors.", tuple(wrong))
    return Readiness(
        store="ok",
        cluster=view.address,
        owner=lease.owner if lease else "",
        epoch=lease.epoch if lease else 0,
        warnings=(*context.warnings(), *_clusters_away(view)),
    )
