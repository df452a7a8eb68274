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
from shoal_api.http.page_files import served
from shoal_service.control.code_archive import CodeArchiveError
from shoal_service.problems import ProblemKind, ServiceError
from shoal_service.store import NotFound
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem

PROBLEM_JSON = "application/problem+json"
_MAX_ERRORS = 100
_UNAVAILABLE = 503
_RETRY_AFTER_S = "2"
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'"}


class Forbidden(ServiceError):
    kind = ProblemKind(
        "forbidden",
        403,
        "The token may not do this",
        "The role of the token, or its projects, do not allow it. The detail says what is needed.",
    )


class Csrf(ServiceError):
    kind = ProblemKind(
        "csrf",
        403,
        "The request does not come from the page",
        "A change with a session's cookie needs the header X-CSRF-Token, which GET /v1/whoami tells.",
    )


class MethodNotAllowed(ServiceError):
    kind = ProblemKind("method-not-allowed", 405, "Method not allowed", "See the Allow header.")


class NotAcceptable(ServiceError):
    kind = ProblemKind("not-acceptable", 406, "No such form here", "The server cannot answer in this form; see detail.")


class BadDocument(ServiceError):
    kind = ProblemKind(
        "bad-document",
        400,
        "The body cannot be read",
        "It is not UTF-8, not valid JSON, too deeply nested, or has numbers that JSON does not allow.",
    )


class BadRequest(ServiceError):
    kind = ProblemKind("bad-request", 400, "Bad request", "The request violates HTTP.")


class BodyTooLarge(ServiceError):
    kind = ProblemKind("body-too-large", 413, "The body is too large", "Specs: 1 MiB. Code archives: 64 MiB.")


class UnsupportedMediaType(ServiceError):
    kind = ProblemKind(
        "unsupported-media-type", 415, "Unsupported media type", "The detail names the possible values of Content-Type."
    )


class InvalidRequest(ServiceError):
    kind = ProblemKind(
        "invalid-request",
        422,
        "Invalid request",
        "A parameter, a header, a part of the path, or the body is invalid; see errors.",
    )


class InvalidSpec(ServiceError):
    kind = ProblemKind("invalid-spec", 422, "Invalid job spec", "`errors` lists every error of the spec.")


class InvalidPatch(ServiceError):
    kind = ProblemKind("invalid-patch", 422, "Invalid change", "The change is invalid, or the spec after it is.")


class NodeNotFound(ServiceError):
    kind = ProblemKind("node-not-found", 404, "No such node", "GET /v1/nodes lists the nodes of the cluster.")


class CrossOrigin(ServiceError):
    kind = ProblemKind(
        "cross-origin", 403, "Cross-origin request refused", "A web page of another origin must not change anything."
    )


class UnknownHost(ServiceError):
    kind = ProblemKind(
        "unknown-host",
        421,
        "The request is for another server",
        "Host is neither an address nor localhost nor one of the names in SHOAL_ALLOWED_HOSTS.",
    )


class TooManyRequests(ServiceError):
    kind = ProblemKind(
        "too-many-requests",
        429,
        "Too many requests",
        "A limit of this server is reached; Retry-After says when to try again. Nothing was done.",
    )


class NotReady(ServiceError):
    kind = ProblemKind("not-ready", 503, "Not ready", "The store or the cluster cannot be reached; see errors.")


class Internal(ServiceError):
    kind = ProblemKind(
        "internal-error", 500, "Internal error", "The service has failed. Its log holds the cause under `error_id`."
    )


def install(app: FastAPI) -> None:
    """Register the handlers of all expected errors."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(SpecError, _invalid_spec)
    app.add_exception_handler(CodeArchiveError, _invalid_code)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _invalid_parameters)


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


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return problem_response(error, request.url.path)


async def _invalid_spec(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecError)
    detail = f"The job spec is not valid: {len(error.problems)} problem(s); see errors."
    return problem_response(InvalidSpec(detail, error.problems), request.url.path)


async def _invalid_code(request: Request, error: Exception) -> Response:
    return problem_response(InvalidSpec(str(error)), request.url.path)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    match error.status_code:
        case 404 if "text/html" in request.headers.get("accept", ""):
            return Response(served("missing.html")[0], 404, media_type="text/html", headers=_PAGE_HEADERS)
        case 404:
            problem: ServiceError = NotFound("There is no such path; /docs lists every route.", headers=headers)
        case 405:
            headers["Allow"] = _allowed_methods(request) or headers.get("Allow", "GET")
            detail = f"{request.method[:20]} is not possible for this path; see Allow."
            problem = MethodNotAllowed(detail, headers=headers)
        case status:
            problem = BadRequest(http.HTTPStatus(status).phrase, headers=headers)
    return problem_response(problem, request.url.path)


def _allowed_methods(request: Request) -> str:
    """Return the methods of all routes with this path, as the header Allow lists them."""
    # the header that the router sets has only those of the first route
    paths: dict[str, dict[str, object]] = request.app.openapi()["paths"]
    methods = {
        verb.upper()
        for template, operations in paths.items()
        if compile_path(template)[0].match(request.url.path)
        for verb in operations
    }
    return ", ".join(sorted(methods))


async def _invalid_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = tuple(
        SpecProblem(path=".".join(map(str, detail["loc"])), message=str(detail["msg"])) for detail in error.errors()
    )
    detail = "; ".join(f"{problem.path}: {problem.message}" for problem in errors[:3])
    return problem_response(InvalidRequest(detail, errors), request.url.path)
