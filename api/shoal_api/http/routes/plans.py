"""The route that predicts the layouts of a job, their memory and their step time."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from shoal_api.http.access.needs import needs
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.edge import CLIENT_GONE
from shoal_api.http.long_poll import while_connected
from shoal_api.http.openapi import body_of
from shoal_service.control.planning import PlanAnswer, PlanRequest
from shoal_service.core.access import Permission


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/plans", tags=["specs"])

    @router.post(
        "",
        dependencies=[needs(Permission.SPECS_CHECK)],
        response_model=PlanAnswer,
        summary="Predict the layouts of a job",
        openapi_extra=body_of("PlanRequest", JSON_TYPES),
    )
    async def make_plan(request: Request) -> Response:
        """Legal layouts for a number of workers, or of GPUs of one kind, best first: memory and step time by part, with
        reasons. Nothing is submitted or run. A search that takes longer than 20 s is refused."""
        plan = await read_model(request, PlanRequest)
        found = await while_connected(request, context.planning.answer(plan))
        if found is None:
            return Response(status_code=CLIENT_GONE)
        return Response(found.model_dump_json(), media_type="application/json")

    return router
