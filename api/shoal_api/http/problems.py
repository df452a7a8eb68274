"""The types of problems, and how every error becomes an RFC 9457 problem document. A client never
sees a traceback or an internal message.

Kind                        code, HTTP status, title, meaning: part of the API, `/problems` and `/docs` list them
ProblemError                raised by routes
errors of the service       mapped by `_OF_SERVICE`, the only place that knows their HTTP status
FastAPI's and Starlette's   unknown route, wrong method, invalid parameters
anything else               500 with an `error_id`; answered by `edge.Edge`, which logs the cause under that id
"""

from __future__ import annotations

import http
from collections.abc import Mapping
from enum import Enum

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from shoal_api.answers import Problem, ProblemType
from shoal_api.http.page_files import served
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
    ModelNotFound,
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
    TooManyViews,
    UserNotFound,
    ViewNotFound,
)
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem


class Kind(Enum):
    """The value is (code, HTTP status, title, meaning)."""

    NOT_FOUND = ("not-found", 404, "No such resource", "No route has this path, or there is no such resource.")
    JOB_NOT_FOUND = ("job-not-found", 404, "No such job", "No job has this id.")
    UNAUTHENTICATED = (
        "unauthenticated",
        401,
        "No valid token",
        "The request shows no token, or one that is unknown, expired or revoked. The detail names the way out.",
    )
    FORBIDDEN = (
        "forbidden",
        403,
        "The token may not do this",
        "The role of the token, or its projects, do not allow it. The detail says what is needed.",
    )
    CSRF = (
        "csrf",
        403,
        "The request does not come from the page",
        "A change with a session's cookie needs the header X-CSRF-Token, which GET /v1/whoami tells.",
    )
    METHOD_NOT_ALLOWED = ("method-not-allowed", 405, "Method not allowed", "See the Allow header.")
    NOT_ACCEPTABLE = ("not-acceptable", 406, "No such form here", "The server cannot answer in this form; see detail.")
    BAD_DOCUMENT = (
        "bad-document",
        400,
        "The body cannot be read",
        "It is not UTF-8, not valid JSON, too deeply nested, or has numbers that JSON does not allow.",
    )
    BAD_REQUEST = ("bad-request", 400, "Bad request", "The request violates HTTP.")
    BODY_TOO_LARGE = ("body-too-large", 413, "The body is too large", "Specs: 1 MiB. Code archives: 64 MiB.")
    UNSUPPORTED_MEDIA_TYPE = (
        "unsupported-media-type",
        415,
        "Unsupported media type",
        "The detail names the possible values of Content-Type.",
    )
    INVALID_REQUEST = (
        "invalid-request",
        422,
        "Invalid request",
        "A parameter, a header, a part of the path, or the body is invalid; see errors.",
    )
    INVALID_SPEC = ("invalid-spec", 422, "Invalid job spec", "`errors` lists every error of the spec.")
    INVALID_PATCH = (
        "invalid-patch",
        422,
        "Invalid change",
        "The change is invalid, or the spec after it is.",
    )
    INVALID_CURSOR = ("invalid-cursor", 400, "Invalid cursor", "Pass `next_cursor` of a page unchanged, or no cursor.")
    IDEMPOTENCY_CONFLICT = (
        "idempotency-conflict",
        409,
        "Idempotency key belongs to another spec",
        "An earlier request with this Idempotency-Key had another spec. Use a new key for a new job.",
    )
    PRECONDITION_FAILED = (
        "precondition-failed",
        412,
        "The job has changed",
        "If-Match does not name the current ETag. Read the job again, then repeat the change.",
    )
    JOB_ENDED = (
        "job-ended",
        409,
        "The job has ended",
        "A job that has ended can be read but not changed, except its name, labels and annotations.",
    )
    REQUEST_CONFLICT = (
        "request-conflict",
        409,
        "Not possible now",
        "The state of the job or node does not allow this.",
    )
    SUPERVISOR_REPLACED = (
        "supervisor-replaced",
        409,
        "The attempt has a later supervisor",
        "Only the newest supervisor of an attempt may report. This one has to end.",
    )
    NODE_NOT_FOUND = ("node-not-found", 404, "No such node", "GET /v1/nodes lists the nodes of the cluster.")
    PROJECT_NOT_FOUND = (
        "project-not-found",
        404,
        "No such project",
        "The project is not defined. GET /v1/projects lists the projects.",
    )
    SWEEP_NOT_FOUND = ("sweep-not-found", 404, "No such sweep", "GET /v1/sweeps lists the sweeps.")
    SWEEP_CONFLICT = (
        "sweep-conflict",
        409,
        "The name is that of another sweep",
        "The project has a sweep with this name and other jobs. Use another name, or repeat the request as it was.",
    )
    USER_NOT_FOUND = (
        "user-not-found",
        404,
        "No such user",
        "The user has neither limits nor jobs. GET /v1/users lists the users.",
    )
    TOKEN_NOT_FOUND = ("token-not-found", 404, "No such token", "GET /v1/tokens lists the tokens.")
    GATEWAY_REFUSED = (
        "gateway-refused",
        409,
        "Another gateway speaks for the cluster",
        "One gateway at a time reports a cluster and carries out its orders. This one may stand by and ask again.",
    )
    CLUSTER_NAME_TAKEN = (
        "cluster-name-taken",
        403,
        "Another Ray cluster has this name",
        "A name is that of one Ray cluster. The detail names the way out.",
    )
    CLUSTER_NOT_FOUND = (
        "cluster-not-found",
        404,
        "No such cluster",
        "No cluster has joined under this name. GET /v1/clusters lists the clusters.",
    )
    CLUSTER_CONFLICT = (
        "cluster-conflict",
        409,
        "The cluster cannot be removed now",
        "Jobs have attempts there, or its gateway is one of this service. The detail names the way out.",
    )
    MOVE_REFUSED = (
        "move-refused",
        409,
        "The job cannot run in that cluster",
        "It is away, cordoned or too small, or it cannot read the job's checkpoints. The detail names the way out.",
    )
    CHECKPOINT_NOT_FOUND = (
        "checkpoint-not-found",
        404,
        "No such checkpoint",
        "GET /v1/jobs/{id}/checkpoints lists the checkpoints of a job.",
    )
    PROFILE_NOT_FOUND = (
        "profile-not-found",
        404,
        "No such profile, or no such file of it",
        "GET /v1/jobs/{id}/profiles lists the profiles of a job with their files.",
    )
    PROFILE_OPEN = (
        "profile-open",
        409,
        "Another profile is being taken",
        "A job has one open request at a time. Ask again once it has ended.",
    )
    STORAGE_AWAY = (
        "storage-away",
        502,
        "The storage does not answer",
        "The server cannot reach the job's checkpoint directory, or it does not answer in time.",
    )
    CHECKPOINT_CONFLICT = (
        "checkpoint-conflict",
        409,
        "Not possible for this checkpoint",
        "Only a committed checkpoint can be pinned, and only one that is in the storage deleted or verified.",
    )
    CHECKPOINT_KEPT = (
        "checkpoint-kept",
        409,
        "The checkpoint is needed",
        "It is pinned, or it is the newest one of a job that has not ended. The detail names the way out.",
    )
    PROJECT_CONFLICT = (
        "project-conflict",
        409,
        "The project cannot be changed so",
        "Its parent is not defined, it would be above itself, or it is the parent of another project.",
    )
    QUEUE_FULL = (
        "queue-full",
        409,
        "The project or the user has enough queued jobs",
        "`max_queued` of the user, of the project, or of one above it, is reached. Nothing was submitted.",
    )
    CODE_MISMATCH = (
        "code-mismatch",
        422,
        "The archive does not match its name",
        "The SHA-256 of the body differs from the one in the path, or the body is not a valid zip archive.",
    )
    CODE_UNKNOWN = (
        "code-unknown",
        422,
        "Code archive not uploaded",
        "`code.archive` names an archive that the service does not have. PUT /v1/code/{sha256} first.",
    )
    CROSS_ORIGIN = (
        "cross-origin",
        403,
        "Cross-origin request refused",
        "A web page of another origin must not change anything.",
    )
    UNKNOWN_HOST = (
        "unknown-host",
        421,
        "The request is for another server",
        "Host is neither an address nor localhost nor one of the names in SHOAL_ALLOWED_HOSTS.",
    )
    TOO_MANY_REQUESTS = (
        "too-many-requests",
        429,
        "Too many requests",
        "A limit of this server is reached; Retry-After says when to try again. Nothing was done.",
    )
    ISSUER_AWAY = (
        "issuer-away",
        503,
        "The issuer of tokens does not answer",
        "The keys of the OpenID Connect issuer cannot be read, so its tokens cannot be checked. Others can.",
    )
    NOT_READY = ("not-ready", 503, "Not ready", "The store or the cluster cannot be reached; see errors.")
    STORE_UNAVAILABLE = (
        "store-unavailable",
        503,
        "The store cannot be reached",
        "The database does not answer, or is locked. Try again.",
    )
    INTERNAL = (
        "internal-error",
        500,
        "Internal error",
        "The service has failed. Its log holds the cause under `error_id`.",
    )

    @property
    def code(self) -> str:
        return self.value[0]

    @property
    def status(self) -> int:
        return self.value[1]

    @property
    def title(self) -> str:
        return self.value[2]

    @property
    def uri(self) -> str:
        return f"/problems/{self.code}"

    def described(self) -> ProblemType:
        return ProblemType(type=self.uri, title=self.title, status=self.status, meaning=self.value[3])


BY_CODE = {kind.code: kind for kind in Kind}
PROBLEM_JSON = "application/problem+json"
_MAX_ERRORS = 100
_UNAVAILABLE = 503
_COME_BACK_S = "2"
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'"}
_OF_STATUS = {404: Kind.NOT_FOUND, 405: Kind.METHOD_NOT_ALLOWED}
_OF_SERVICE: dict[type[Exception], Kind] = {
    JobNotFound: Kind.JOB_NOT_FOUND,
    ProjectNotFound: Kind.PROJECT_NOT_FOUND,
    ViewNotFound: Kind.NOT_FOUND,
    ModelNotFound: Kind.NOT_FOUND,
    TooManyViews: Kind.REQUEST_CONFLICT,
    UserNotFound: Kind.USER_NOT_FOUND,
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
    if kind is Kind.NOT_FOUND and "text/html" in request.headers.get("accept", ""):
        return Response(served("missing.html")[0], 404, media_type="text/html", headers=_PAGE_HEADERS)
    if kind is Kind.METHOD_NOT_ALLOWED:
        headers["Allow"] = _allowed_methods(request) or headers.get("Allow", "GET")
    return problem_response(kind, detail=detail, instance=request.url.path, headers=headers)


def _allowed_methods(request: Request) -> str:
    """Return the methods of all routes with this path; the router knows only those of the first."""
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
