"""The errors of the HTTP edge, and how every error becomes an RFC 9457 problem document. A client never sees a
traceback or an internal message.

ServiceError                those of the edge are below; for the others see `shoal_service/problems.py`
SpecError, CodeArchiveError an invalid spec
FastAPI's and Starlette's   unknown route, wrong method, invalid parameters
anything else               500 with an `error_id`; answered by `edge.Edge`, which logs the cause under that id
"""

from __future__ import annotations

import http

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from shoal_api.answers import Problem
from shoal_api.http.page_files import read_served
from shoal_service.control.code_archive import CodeArchiveError
from shoal_service.problems import ServiceError
from shoal_service.store import NotFound
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem

PROBLEM_JSON = "application/problem+json"
_MAX_ERRORS = 100
_UNAVAILABLE = 503
_RETRY_AFTER_S = "2"
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'"}


class Forbidden(ServiceError, code="forbidden", status=403, title="The token may not do this"):
    """The role of the token, or its projects, do not allow it. The detail says what is needed."""


class Csrf(ServiceError, code="csrf", status=403, title="The request does not come from the page"):
    """A change with a session's cookie needs the header X-CSRF-Token, which GET /v1/whoami tells."""


class MethodNotAllowed(ServiceError, code="method-not-allowed", status=405, title="Method not allowed"):
    """See the Allow header."""


class NotAcceptable(ServiceError, code="not-acceptable", status=406, title="No such form here"):
    """The server cannot answer in this form; see detail."""


class BadDocument(ServiceError, code="bad-document", status=400, title="The body cannot be read"):
    """It is not UTF-8, not valid JSON, too deeply nested, or has numbers that JSON does not allow."""


class BadRequest(ServiceError, code="bad-request", status=400, title="Bad request"):
    """The request violates HTTP."""


class BodyTooLarge(ServiceError, code="body-too-large", status=413, title="The body is too large"):
    """Specs: 1 MiB. Code archives: 64 MiB."""


class UnsupportedMediaType(ServiceError, code="unsupported-media-type", status=415, title="Unsupported media type"):
    """The detail names the possible values of Content-Type."""


class InvalidRequest(ServiceError, code="invalid-request", status=422, title="Invalid request"):
    """A parameter, a header, a part of the path, or the body is invalid; see errors."""


class InvalidSpec(ServiceError, code="invalid-spec", status=422, title="Invalid job spec"):
    """`errors` lists every error of the spec."""


class InvalidPatch(ServiceError, code="invalid-patch", status=422, title="Invalid change"):
    """The change is invalid, or the spec after it is."""


class NodeNotFound(ServiceError, code="node-not-found", status=404, title="No such node"):
    """GET /v1/nodes lists the nodes of the cluster."""


class CrossOrigin(ServiceError, code="cross-origin", status=403, title="Cross-origin request refused"):
    """A web page of another origin must not change anything."""


class UnknownHost(ServiceError, code="unknown-host", status=421, title="The request is for another server"):
    """Host is neither an address nor localhost nor one of the names in SHOAL_ALLOWED_HOSTS."""


class TooManyRequests(ServiceError, code="too-many-requests", status=429, title="Too many requests"):
    """A limit of this server is reached; Retry-After says when to try again. Nothing was done."""


class NotReady(ServiceError, code="not-ready", status=503, title="Not ready"):
    """The store or the cluster cannot be reached; see errors."""


class Internal(ServiceError, code="internal-error", status=500, title="Internal error"):
    """The service has failed. Its log holds the cause under `error_id`."""


def install(app: FastAPI) -> None:
    """Register the handlers of all expected errors."""
    for expected in (ServiceError, SpecError, CodeArchiveError, HTTPException, RequestValidationError):
        app.add_exception_handler(expected, _answer)


def problem_response(error: ServiceError, instance: str, error_id: str | None = None) -> Response:
    """Return the error as a problem document about the path `instance`."""
    kind = error.kind
    problem = Problem(
        type=kind.uri,
        title=kind.title,
        status=kind.status,
        detail=str(error),
        instance=instance,
        code=kind.code,
        errors=error.errors[:_MAX_ERRORS],
        error_id=error_id,
    )
    headers = {"Retry-After": _RETRY_AFTER_S} if kind.status == _UNAVAILABLE else {}
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, kind.status, headers | dict(error.headers or {}), media_type=PROBLEM_JSON)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404 and _wants_page(request):
        return Response(read_served("missing.html")[0], 404, media_type="text/html", headers=_PAGE_HEADERS)
    return problem_response(_find_problem(request, error), request.url.path)


def _wants_page(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def _find_problem(request: Request, error: Exception) -> ServiceError:
    """Return the problem that an expected error is for the client."""
    match error:
        case ServiceError():
            return error
        case SpecError(problems=problems):
            return InvalidSpec(f"The job spec is not valid: {len(problems)} problem(s); see errors.", problems)
        case RequestValidationError():
            errors = tuple(
                SpecProblem(path=".".join(map(str, detail["loc"])), message=str(detail["msg"]))
                for detail in error.errors()
            )
            return InvalidRequest("; ".join(f"{problem.path}: {problem.message}" for problem in errors[:3]), errors)
        case HTTPException(status_code=404):
            return NotFound("There is no such path; /docs lists every route.", headers=error.headers)
        case HTTPException(status_code=405):
            allowed = _allowed_methods(request) or (error.headers or {}).get("Allow", "GET")
            detail = f"{request.method[:20]} is not possible for this path; see Allow."
            return MethodNotAllowed(detail, headers={**(error.headers or {}), "Allow": allowed})
        case HTTPException():
            return BadRequest(http.HTTPStatus(error.status_code).phrase, headers=error.headers)
        case _:  # CodeArchiveError
            return InvalidSpec(str(error))


def _allowed_methods(request: Request) -> str:
    """Return the methods of all routes with this path, as the header Allow lists them."""
    # the header that the router sets has only those of the first route
    paths: dict[str, dict[str, object]] = request.app.openapi()["paths"]
    methods = {
        method.upper()
        for template, operations in paths.items()
        if compile_path(template)[0].match(request.url.path)
        for method in operations
    }
    return ", ".join(sorted(methods))
