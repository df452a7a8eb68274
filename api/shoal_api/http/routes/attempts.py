"""Routes that the supervisor of an attempt dials: its reports, and the directives for it. They take the token of the
attempt, and no other one.

Each running attempt asks them every second, so `direct_routes` answers what supervisors really send, at a third of the
cost: the token is that of the attempt in the path, and the query is as they write it. Every other request, and what is
wrong with it, is for the routes of FastAPI, which are also those of the OpenAPI document.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Path, Query, Request
from pydantic import ValidationError
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from shoal_api.http.access.needs import OF_ATTEMPT
from shoal_api.http.access.request_scope import ATTEMPT, OPEN_ENDED, POLL
from shoal_api.http.json_router import MAX_SEQ, JobId, JsonRouter, json_response
from shoal_api.http.problems import BadDocument
from shoal_api.http.request_bodies import JSON_TYPES, read_body, require_media_type
from shoal_api.http.streams import while_connected
from shoal_service.control.supervisor_reports import SupervisorEndpoint
from shoal_service.home import MAX_WAIT_S, AttemptCaller, DirectiveAnswer, HomeReport, ReportReceipt
from shoal_service.store import JobEnded, JobNotFound, RequestConflict
from shoal_workers.contract.plain_text import first_problem

MAX_REPORT_BYTES = 32 << 20
"""A report has at most 5,000 items of a kind."""
_BODY = {
    "requestBody": {
        "required": True,
        "content": {JSON_TYPES[0]: {"schema": {"type": "object", "description": "HomeReport of shoal_service.home"}}},
    }
}
Attempt = Annotated[int, Path(ge=1, le=2**31 - 1, description="Number of the attempt.")]


_PREFIX = "/v1/jobs/{job_id}/attempts/{attempt}"
_AS_SENT = re.compile(rb"after=([0-9]{1,18})&wait_s=([0-9]{1,3}(?:\.[0-9]{1,6})?)")
"""The query of a supervisor's long poll."""


router = JsonRouter(_PREFIX, "supervisors", raises=[JobNotFound])


@router.route(
    "POST /reports",
    OF_ATTEMPT,
    "Store what the supervisor of an attempt reports",
    answer=ReportReceipt,
    openapi_extra=_BODY,
    raises=[JobEnded, RequestConflict],
)
async def take_report(request: Request, job_id: JobId, attempt: Attempt) -> Response:
    """Supervisors send reports; their release is that of the service or the one before. The receipt says which
    items are stored; 409: the attempt has a later supervisor."""
    return await _take_report(request)


@router.route("GET /directive", OF_ATTEMPT, "What the control plane wants of an attempt now", answer=DirectiveAnswer)
async def directive(
    request: Request,
    job_id: JobId,
    attempt: Attempt,
    after: Annotated[int, Query(ge=0, le=MAX_SEQ, description="Number of the directive that is known.")] = 0,
    wait_s: Annotated[
        float, Query(ge=0, le=MAX_WAIT_S, description="How long to wait for a directive with another number.")
    ] = 0.0,
) -> Response:
    """A long poll of supervisors. It answers at once if the newest directive has another number than `after`."""
    return await _answer_directive(request, after, wait_s)


def direct_routes() -> tuple[Route, ...]:
    """Return the routes that are tried before all others."""
    return (
        _Direct("POST", "/reports", _take_report, _read_no_query),
        _Direct("GET", "/directive", _answer_directive_directly, _read_query),
    )


class _Direct(Route):
    """Matches if the request shows the token of the attempt in its path, and its query can be read."""

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        read_query: Callable[[bytes], dict[str, float] | None],
    ) -> None:
        super().__init__(f"{_PREFIX}{path}", endpoint, methods=[method], include_in_schema=False)
        self._method = method
        self._end = path
        self._read_query = read_query

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        caller: AttemptCaller | None = scope.get(ATTEMPT)
        if caller is None or scope["method"] != self._method:
            return Match.NONE, {}
        if scope["path"] != f"/v1/jobs/{caller.job_id}/attempts/{caller.attempt}{self._end}":
            return Match.NONE, {}
        parameters = self._read_query(scope["query_string"])
        if parameters is None:
            return Match.NONE, {}
        return Match.FULL, {"endpoint": self.endpoint, "path_params": parameters, "route": self}


def _read_no_query(query: bytes) -> dict[str, float] | None:
    return None if query else {}


def _read_query(query: bytes) -> dict[str, float] | None:
    """Return `after` and `wait_s`; None if they are not as a supervisor writes them."""
    match = _AS_SENT.fullmatch(query)
    if match is None or float(match[2]) > MAX_WAIT_S:
        return None
    return {"after": int(match[1]), "wait_s": float(match[2])}


async def _take_report(request: Request) -> Response:
    require_media_type(request, JSON_TYPES)
    raw = await read_body(request, MAX_REPORT_BYTES)
    try:
        report = HomeReport.model_validate_json(raw, extra="ignore")
    except ValidationError as error:
        raise BadDocument(f"The report is not valid: {first_problem(error)}") from None
    receipt = await request.app.state.context.supervisor_endpoint.store_report(request.scope[ATTEMPT], report)
    return json_response(receipt)


async def _answer_directive_directly(request: Request) -> Response:
    return await _answer_directive(request, **request.path_params)


async def _answer_directive(request: Request, after: int, wait_s: float) -> Response:
    request.scope[OPEN_ENDED] = POLL
    endpoint: SupervisorEndpoint = request.app.state.context.supervisor_endpoint
    newest = await while_connected(request, endpoint.wait_for_directive(request.scope[ATTEMPT], after, wait_s))
    return json_response(newest or DirectiveAnswer(number=after))
