"""The route of the audit. There is none that changes it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import needs
from shoal_api.http.context import MAX_SEQ, Context
from shoal_service.access_views import AuditPage
from shoal_service.core.access import Permission
from shoal_service.store import audit
from shoal_service.store.audit import AuditQuery


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/audit", tags=["access"])
    store = context.store

    @router.get("", dependencies=[needs(Permission.AUDIT_READ)], response_model=AuditPage, summary="Who changed what")
    async def read_audit(
        before: Annotated[int | None, Query(ge=1, le=MAX_SEQ, description="Only older ones than this number.")] = None,
        job: Annotated[str | None, Query(max_length=64, description="Only those about this job.")] = None,
        actor: Annotated[str | None, Query(max_length=200, description="Only those of this principal.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="Events per answer.")] = 100,
    ) -> Response:
        """Every change through the API, and every one that was refused with 403, newest first: who, what, from where. A
        change and its record are one transaction. Nothing changes or deletes a record."""
        query = AuditQuery(before=before, job_id=job, actor=actor, limit=limit)
        found = await run_in_threadpool(store.reading(audit.read), query)
        page = AuditPage(items=tuple(found), next_before=found[-1].number if len(found) == limit else None)
        return Response(page.model_dump_json(), media_type="application/json")

    return router
