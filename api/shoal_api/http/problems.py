"""Turns every error into an RFC 9457 problem document. Never shows a traceback or an internal message to a client.

ProblemError                raised by routes
errors of the service       mapped by `_OF_SERVICE`, the only place that knows their HTTP status
FastAPI's and Starlette's   unknown route, wrong method, invalid parameters
anything else               500 with an `error_id`; answered by `edge.Edge`, which logs the cause under that id
"""

from __future__ import annotations

import http
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from shoal_api.answers import Problem
from shoal_api.http.problem_types import Kind
from shoal_service.control.code_archive import CodeArchiveError
from shoal_service.control.job_storage import StorageAway
from shoal_service.control.submission import CodeUnknown
from shoal_service.store.errors import (
    AttemptTokenRefused,
    CheckpointConflict,
    CheckpointKept,
    CheckpointNotFound,
    ClusterConflict,
    ClusterNameTaken,
    ClusterNotFound,
    GatewayRefused,
    IdempotencyConflict,
    InvalidArchive,
    InvalidCursor,
    JobEnded,
    JobNotFound,
    LifecycleConflict,
    MoveRefused,
    PreconditionFailed,
    ProfileNotFound,
    ProfileOpen,
    ProjectConflict,
    ProjectNotFound,
    QueueFull,
    RequestConflict,
    StoreUnavailable,
    SupervisorReplaced,
    SweepConflict,
    SweepNotFound,
    TokenNotFound,
    UserNotFound,
    WindowNotFound,
)
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem

PROBLEM_JSON = "application/problem+json"
_MAX_ERRORS = 100
_UNAVAILABLE = 503
_COME_BACK_S = "2"
_OF_STATUS = {404: Kind.NOT_FOUND, 405: Kind.METHOD_NOT_ALLOWED}
_OF_SERVICE: dict[type[Exception], Kind] = {
    JobNotFound: Kind.JOB_NOT_FOUND,
    ProjectNotFound: Kind.PROJECT_NOT_FOUND,
    UserNotFound: Kind.USER_NOT_FOUND,
    WindowNotFound: Kind.WINDOW_NOT_FOUND,
    TokenNotFound: Kind.TOKEN_NOT_FOUND,
    GatewayRefused: Kind.GATEWAY_REFUSED,
    ClusterNameTaken: Kind.CLUSTER_NAME_TAKEN,
    ClusterNotFound: Kind.CLUSTER_NOT_FOUND,
    ClusterConflict: Kind.CLUSTER_CONFLICT,
    MoveRefused: Kind.MOVE_REFUSED,
    CheckpointNotFound: Kind.CHECKPOINT_NOT_FOUND,
    CheckpointConflict: Kind.CHECKPOINT_CONFLICT,
    CheckpointKept: Kind.CHECKPOINT_KEPT,
    ProfileNotFound: Kind.PROFILE_NOT_FOUND,
    ProfileOpen: Kind.PROFILE_OPEN,
    StorageAway: Kind.STORAGE_AWAY,
    ProjectConflict: Kind.PROJECT_CONFLICT,
    SweepConflict: Kind.SWEEP_CONFLICT,
    SweepNotFound: Kind.SWEEP_NOT_FOUND,
    QueueFull: Kind.QUEUE_FULL,
    InvalidCursor: Kind.INVALID_CURSOR,
    IdempotencyConflict: Kind.IDEMPOTENCY_CONFLICT,
    PreconditionFailed: Kind.PRECONDITION_FAILED,
    JobEnded: Kind.JOB_ENDED,
    LifecycleConflict: Kind.REQUEST_CONFLICT,
    RequestConflict: Kind.REQUEST_CONFLICT,
    StoreUnavailable: Kind.STORE_UNAVAILABLE,
    AttemptTokenRefused: Kind.UNAUTHENTICATED,
    SupervisorReplaced: Kind.SUPERVISOR_REPLACED,
    CodeUnknown: Kind.CODE_UNKNOWN,
    InvalidArchive: Kind.CODE_MISMATCH,
    CodeArchiveError: Kind.INVALID_SPEC,
    SpecError: Kind.INVALID_SPEC,
}


class ProblemError(Exception):
    """Raised by routes, answered as a problem document of `kind`."""

    def __init__(
        self,
        kind: Kind,
        detail: str,
        errors: tuple[SpecProblem, ...] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(kind, detail, errors, headers)
        self.kind = kind
        self.detail = detail
        self.errors = errors
        self.headers = headers


def install(app: FastAPI) -> None:
    """Register the handlers of all expected errors."""
    app.add_exception_handler(ProblemError, _problem_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _invalid_parameters)
    for known in _OF_SERVICE:
        app.add_exception_handler(known, _service_error)


def problem_response(
    kind: Kind,
    *,
    detail: str,
    instance: str,
    errors: tuple[SpecProblem, ...] = (),
    error_id: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    problem = Problem(
        type=kind.uri,
        title=kind.title,
        status=kind.status,
        detail=detail,
        instance=instance,
        code=kind.code,
        errors=errors[:_MAX_ERRORS],
        error_id=error_id,
    )
    body = problem.model_dump_json(exclude_none=True)
    if kind.status == _UNAVAILABLE:
        headers = {"Retry-After": _COME_BACK_S, **(headers or {})}
    return Response(body, status_code=kind.status, media_type=PROBLEM_JSON, headers=headers)


async def _problem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem_response(
        error.kind, detail=error.detail, instance=request.url.path, errors=error.errors, headers=error.headers
    )


async def _service_error(request: Request, error: Exception) -> Response:
    kind = next(_OF_SERVICE[known] for known in type(error).__mro__ if known in _OF_SERVICE)
    if isinstance(error, SpecError):
        detail = f"The job spec is not valid: {len(error.problems)} problem(s); see errors."
        return problem_response(kind, detail=detail, instance=request.url.path, errors=error.problems)
    return problem_response(kind, detail=str(error), instance=request.url.path)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _OF_STATUS.get(error.status_code, Kind.BAD_REQUEST)
    detail = {
        Kind.NOT_FOUND: "There is no such path; /docs lists every route.",
        Kind.METHOD_NOT_ALLOWED: f"{request.method[:20]} is not possible for this path; see Allow.",
    }.get(kind, http.HTTPStatus(error.status_code).phrase)
    headers = dict(error.headers or {})
    if kind is Kind.METHOD_NOT_ALLOWED:
        headers["Allow"] = _allowed_methods(request) or headers.get("Allow", "GET")
    return problem_response(kind, detail=detail, instance=request.url.path, headers=headers)


def _allowed_methods(request: Request) -> str:
    """Methods of all routes with this path; the router knows only those of the first."""
    paths: dict[str, dict[str, object]] = request.app.openapi()["paths"]
    methods = {
        verb.upper()
        for template, verbs in paths.items()
        if compile_path(template)[0].match(request.url.path)
        for verb in verbs
    }
    return ", ".join(sorted(methods))


async def _invalid_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = tuple(
        SpecProblem(path=".".join(map(str, detail["loc"])), message=str(detail["msg"])) for detail in error.errors()
    )
    detail = "; ".join(f"{problem.path}: {problem.message}" for problem in errors[:3])
    return problem_response(Kind.INVALID_REQUEST, detail=detail, instance=request.url.path, errors=errors)
