"""Builds the application: routes, error handlers, the middleware `Edge`. Importing this module has no effect.

The composition root (`shoal serve`), tests and benchmarks call `create_app`; each call makes a new application. Serve
it with `serving.make_server`, so that open streams end when the server stops.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from shoal_api.http import problems
from shoal_api.http.context import ClusterSource, Context
from shoal_api.http.edge import Edge, RequestObserver
from shoal_api.http.openapi import build_openapi
from shoal_api.http.routes import code, histories, jobs, nodes, operations, pages, plans, projects
from shoal_api.http.streams import DEFAULT_PACE, Pace
from shoal_service.planner import HardwareProfile
from shoal_service.planner.gpus import PROFILES
from shoal_service.store import Store

_DESCRIPTION = (
    "Elastic training service on Ray. Errors are RFC 9457 problem documents. Times are seconds since the epoch, "
    "durations end in `_s`."
)


def create_app(
    *,
    store: Store,
    cluster: ClusterSource,
    registry: CollectorRegistry,
    version: str,
    observe: RequestObserver = lambda method, route, status, seconds: None,
    pace: Pace = DEFAULT_PACE,
    profiles: Mapping[str, HardwareProfile] = PROFILES,
    warnings: Callable[[], tuple[str, ...]] = tuple,
) -> FastAPI:
    """A new application.

    `app.state.changes.close()` ends all streams; `make_server` calls it when the server stops.

    Args:
        observe: called after every request.
        profiles: the hardware that the planner knows, by name.
        warnings: shown by /readyz.
    """
    context = Context(
        store=store,
        cluster=cluster,
        registry=registry,
        version=version,
        pace=pace,
        profiles=profiles,
        warnings=warnings,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.changes.open()
        with store.subscribe(context.changes.notify):
            yield
        context.changes.close()

    app = FastAPI(
        title="Shoal",
        version=version,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.state.changes = context.changes
    app.openapi = partial(build_openapi, app)  # type: ignore[method-assign]
    problems.install(app)
    for router in (
        jobs.routes(context),
        histories.routes(context),
        code.routes(context),
        plans.routes(context),
        projects.routes(context),
        nodes.routes(context),
        operations.routes(context),
    ):
        app.include_router(router)
    app.include_router(pages.routes())
    app.add_middleware(Edge, observe=observe)
    return app
