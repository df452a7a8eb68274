"""Routes that the supervisor of an attempt dials: its reports, and the directives for it. They take the token of the
attempt, and no other one.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import ValidationError
from starlette.responses import Response

from shoal_api.http.access.needs import OF_ATTEMPT, caller_of
from shoal_api.http.context import MAX_SEQ, Context, JobId
from shoal_api.http.documents import JSON_TYPES, read_at_most, require_media_type
from shoal_api.http.edge import OPEN_ENDED, POLL
from shoal_api.http.long_poll import while_connected
from shoal_api.http.problem_types import Kind
from shoal_api.http.problems import ProblemError
from shoal_service.home import MAX_WAIT_S, DirectiveAnswer, HomeReport, ReportReceipt

MAX_REPORT_BYTES = 32 << 20
"""A report has at most 5,000 items of a kind."""
_BODY = {
    "requestBody": {
        "required": True,
        "content": {JSON_TYPES[0]: {"schema": {"type": "object", "description": "HomeReport of shoal_service.home"}}},
    }
}
Attempt = Annotated[int, Path(ge=1, le=2**31 - 1, description="Number of the attempt.")]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}/attempts/{attempt}", tags=["supervisors"])

    @router.post(
        "/reports",
        dependencies=[OF_ATTEMPT],
        response_model=ReportReceipt,
        summary="Store what the supervisor of an attempt reports",
        openapi_extra=_BODY,
    )
    async def take_report(request: Request, job_id: JobId, attempt: Attempt) -> Response:
        """Sent by supervisors, whose release is that of the service or the one before. The receipt says which items are
        stored; 409: the attempt has a later supervisor."""
        require_media_type(request, JSON_TYPES)
        raw = await read_at_most(request, MAX_REPORT_BYTES)
        try:
            report = HomeReport.model_validate_json(raw, extra="ignore")
        except ValidationError as error:
            words = str(error.errors(include_url=False, include_input=False)[0])[:500]
            raise ProblemError(Kind.BAD_DOCUMENT, f"The report is not valid: {words}") from None
        receipt = await context.reception.report(caller_of(request), report)
        return Response(receipt.model_dump_json(), media_type="application/json")

    @router.get(
        "/directive",
        dependencies=[OF_ATTEMPT],
        response_model=DirectiveAnswer,
        summary="What the control plane wants of an attempt now",
    )
    async def directive(
        request: Request,
        job_id: JobId,
        attempt: Attempt,
        after: Annotated[int, Query(ge=0, le=MAX_SEQ, description="Number of the directive that is known.")] = 0,
        wait_s: Annotated[
            float, Query(ge=0, le=MAX_WAIT_S, description="How long to wait for a directive with another number.")
        ] = 0.0,
    ) -> Response:
        """Long poll of supervisors: answers at once if the newest directive has another number than `after`."""
        request.scope[OPEN_ENDED] = POLL
        found = await while_connected(request, context.reception.directive(caller_of(request), after, wait_s))
        answer = found or DirectiveAnswer(number=after)
        return Response(answer.model_dump_json(), media_type="application/json")

    return router
