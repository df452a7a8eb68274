"""Routes for maintenance windows: list, plan, cancel. The control loop drains the nodes in time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import needs
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.openapi import body_of
from shoal_api.http.problem_types import Kind
from shoal_api.http.problems import ProblemError
from shoal_service.control.market.capacity import lead_s
from shoal_service.core.access import Permission
from shoal_service.fleet_views import MaintenanceWindow, WindowRequest, WindowView
from shoal_service.store import node_records
from shoal_service.views import Page

WindowId = Annotated[str, Path(pattern=r"^mw-[0-9a-f]{8}$", description="Id of a window.")]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/maintenance-windows", tags=["operations"])
    store = context.store

    def view(window: MaintenanceWindow) -> WindowView:
        return WindowView(
            **window.model_dump(), drains_at=window.begins_at - lead_s(store.reading(node_records.read_drain_times)())
        )

    def views() -> tuple[WindowView, ...]:
        return tuple(view(window) for window in store.reading(node_records.windows)())

    @router.get(
        "",
        dependencies=[needs(Permission.CLUSTER_READ)],
        response_model=Page[WindowView],
        summary="List the maintenance windows",
    )
    async def list_windows() -> Response:
        """The earliest first; those that have ended are listed for a day."""
        page = Page[WindowView](items=await run_in_threadpool(views))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.post(
        "",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        status_code=201,
        response_model=WindowView,
        summary="Plan a maintenance window",
        openapi_extra=body_of("WindowRequest", JSON_TYPES),
    )
    async def plan_window(request: Request) -> Response:
        """The nodes are drained so early that they are empty when the window begins, and are used again when it ends.
        Jobs leave at a step boundary and lose no step."""
        wanted = await read_model(request, WindowRequest)
        now = context.clock()
        if wanted.ends_at <= now:
            raise ProblemError(Kind.REQUEST_CONFLICT, "The window has ended already: ends_at is not in the future.")
        window = await run_in_threadpool(
            store.writing(node_records.plan_window),
            wanted.nodes,
            begins_at=wanted.begins_at,
            ends_at=wanted.ends_at,
            reason=wanted.reason,
            now=now,
        )
        document = (await run_in_threadpool(view, window)).model_dump_json()
        return Response(document, 201, media_type="application/json")

    @router.delete(
        "/{window_id}",
        dependencies=[needs(Permission.CLUSTER_CHANGE)],
        status_code=204,
        summary="Cancel a maintenance window",
    )
    async def cancel_window(window_id: WindowId) -> Response:
        """Its nodes are used again, also if the window has begun."""
        await run_in_threadpool(store.writing(node_records.cancel_window), window_id)
        return Response(status_code=204)

    return router
