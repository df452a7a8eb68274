"""Route for the state of the delivery of webhooks. The hooks themselves are in specs and in the service's settings."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.context import Context
from shoal_service.views import Page
from shoal_service.webhook_views import WebhookView


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["operations"])
    store = context.store

    @router.get("/webhooks", response_model=Page[WebhookView], summary="What webhooks have delivered")
    async def webhooks(
        job: Annotated[
            str | None,
            Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", description="Only the hooks that concern this job."),
        ] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="At most so many hooks of specs.")] = 100,
    ) -> Response:
        """With `job`: the hooks of the settings and of the job's spec, for this job. Without: the hooks of the settings
        over all jobs, then the hooks of specs whose events wait after a failed attempt, those that wait longest first.
        """
        page = Page[WebhookView](items=tuple(await run_in_threadpool(store.webhooks, job, limit=limit)))
        return Response(page.model_dump_json(), media_type="application/json")

    return router
