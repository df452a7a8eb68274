"""Builds the application: routes, error handlers, the middlewares `Edge` and `Authentication`. Importing this module
has no effect.

The composition root (`shoal serve`), tests and benchmarks call `create_app`; each call makes a new application. Serve
it with `serving.make_server`, so that open streams end when the server stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from shoal_api.http import problems
from shoal_api.http.access.authentication import Authentication, Authenticator
from shoal_api.http.access.limits import Limiter, Limits
from shoal_api.http.access.needs import LoginNeeded, declarations, redirect_to_login
from shoal_api.http.changes import watch_other_writers
from shoal_api.http.context import ClusterSource, Context
from shoal_api.http.edge import Edge
from shoal_api.http.json_router import JsonRouter
from shoal_api.http.openapi import build_openapi
from shoal_api.http.routes import access, artifacts, attempts, clusters, histories, job_tables, jobs, operations, pages
from shoal_api.http.streams import DEFAULT_PACE, Pace
from shoal_service.clock import SystemClock
from shoal_service.control.job_storage import JobStorage
from shoal_service.control.oidc import Issuer
from shoal_service.control.planning import PlanningProcesses
from shoal_service.control.retention import RetentionCollector, RetentionConfig
from shoal_service.control.supervisor_reports import SupervisorEndpoint
from shoal_service.core.retention import Kind
from shoal_service.core.webhooks import UNRESTRICTED, WebhookRules
from shoal_service.planner import HardwareProfile
from shoal_service.planner.gpus import PROFILES
from shoal_service.store import Store
from shoal_service.telemetry.tallies import Count, RequestMetrics
from shoal_workers.contract.checks.places import EVERYWHERE, AllowedPlaces

_DESCRIPTION = (
    "Elastic training service on Ray. Errors are RFC 9457 problem documents. Times are seconds since the epoch, "
    "durations end in `_s`."
)


_ROUTERS: tuple[JsonRouter, ...] = (  # first those that programs ask all the time: routes are tried in this order
    attempts.router,
    clusters.router,
    jobs.router,
    jobs.lifecycle_router,
    job_tables.router,
    jobs.sweep_router,
    histories.router,
    artifacts.checkpoint_router,
    artifacts.router,
    job_tables.overview_router,
    job_tables.curve_router,
    histories.inspection_router,
    jobs.spec_router,
    operations.quota_router,
    operations.node_router,
    operations.cluster_router,
    operations.router,
    jobs.retention_router,
    access.router,
)


def create_app(
    *,
    store: Store,
    cluster: ClusterSource,
    scrape: Callable[..., tuple[bytes, str]],
    version: str,
    checkpoint_url: str = "",
    requests: RequestMetrics | None = None,
    retention: RetentionCollector | None = None,
    pace: Pace = DEFAULT_PACE,
    profiles: Mapping[str, HardwareProfile] = PROFILES,
    warnings: Callable[[], tuple[str, ...]] = tuple,
    exposure: str = "",
    grafana_url: str = "",
    allowed_hosts: frozenset[str] = frozenset(),
    limits: Limits = Limits(),  # noqa: B008
    issuer: Issuer | None = None,
    places: AllowedPlaces = EVERYWHERE,
    webhooks: WebhookRules = UNRESTRICTED,
) -> FastAPI:
    """Return a new application.

    `app.state.changes.close()` ends all streams; `make_server` calls it when the server stops.

    Args:
        checkpoint_url: directory of the checkpoints and profiles of jobs that have no `checkpoint.url`; empty: none.
        scrape: makes the metrics: the header `Accept`, and the projects if not all -> body and media type.
        requests: counts and times every request.
        retention: deletes jobs, and what is old when a user asks; None means one with the default settings.
        profiles: the hardware that the planner knows, by name.
        warnings: shown by /readyz.
        exposure: what the code of jobs can read of the service, shown on the page; empty: nothing.
        grafana_url: Grafana with the dashboards of deploy/grafana, to which the page of a job leads; empty: none.
        issuer: of JWTs that are accepted beside tokens.
        limits: how much one principal may ask.
        places: what the paths and URLs of a spec may name.
        webhooks: what the webhooks of a spec may do.
        allowed_hosts: names that a request may be for, in lower case; addresses and localhost always are.
    """
    storage = JobStorage(checkpoint_url)
    retention = retention or RetentionCollector(store, storage, SystemClock(), RetentionConfig(), Count(Kind))
    authenticator = Authenticator(store, issuer=issuer)
    context = Context(
        authenticator=authenticator,
        supervisor_endpoint=SupervisorEndpoint(store, SystemClock()),
        store=store,
        cluster=cluster,
        scrape=scrape,
        version=version,
        storage=storage,
        retention=retention,
        planning=PlanningProcesses(profiles),
        pace=pace,
        profiles=profiles,
        warnings=warnings,
        exposure=exposure,
        grafana_url=grafana_url,
        places=places,
        webhooks=webhooks,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.changes.open()
        context.changes.when_closed(context.supervisor_endpoint.close)
        others = asyncio.create_task(
            watch_other_writers(context.changes, store, lambda: cluster.snapshot().nodes, pace.reread_s)
        )
        with store.subscribe(context.changes.notify):
            yield
        context.changes.close()
        context.storage.close()
        await context.planning.close()
        others.cancel()
        await authenticator.write_uses()

    app = FastAPI(
        title="Shoal",
        version=version,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.state.context = context
    app.state.changes = context.changes
    app.openapi = partial(build_openapi, app)  # type: ignore[method-assign]
    problems.install(app)
    app.add_exception_handler(LoginNeeded, redirect_to_login)
    app.router.routes.extend(attempts.direct_routes())
    for router in _ROUTERS:
        app.router.routes.extend(router.api_router.routes)  # `include_router` would make each of them again
    app.state.operations = {verb: operation for router in _ROUTERS for verb, operation in router.operations.items()}
    shell = pages.routes()
    app.include_router(shell)
    app.state.declarations = declarations((*(router.api_router for router in _ROUTERS), shell))
    requests = app.state.requests = requests or RequestMetrics()
    limiter = Limiter(limits, requests)
    app.add_middleware(Authentication, authenticator=authenticator, limiter=limiter)
    app.add_middleware(Edge, requests=requests, allowed_hosts=allowed_hosts)
    return app
