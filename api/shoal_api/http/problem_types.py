"""The catalogue of errors: every code that the API may answer, its status and meaning. It is part of the API."""

from __future__ import annotations

from enum import Enum

from shoal_api.answers import ProblemType


class Kind(Enum):
    """value = (code, HTTP status, title, meaning)."""

    NOT_FOUND = ("not-found", 404, "No such resource", "No route has this path, or nothing is stored under it.")
    JOB_NOT_FOUND = ("job-not-found", 404, "No such job", "No job has this id.")
    METHOD_NOT_ALLOWED = ("method-not-allowed", 405, "Method not allowed", "See the Allow header.")
    BAD_DOCUMENT = (
        "bad-document",
        400,
        "The body cannot be read",
        "Not UTF-8, not valid JSON, too deeply nested, or with numbers that JSON lacks.",
    )
    BAD_REQUEST = ("bad-request", 400, "Bad request", "The request breaks the protocol.")
    BODY_TOO_LARGE = ("body-too-large", 413, "The body is too large", "Specs: 1 MiB. Code archives: 64 MiB.")
    UNSUPPORTED_MEDIA_TYPE = (
        "unsupported-media-type",
        415,
        "Unsupported media type",
        "Content-Type must be one of those that the detail names.",
    )
    INVALID_REQUEST = (
        "invalid-request",
        422,
        "Invalid parameters",
        "A query parameter, header or part of the path is out of its range; see errors.",
    )
    INVALID_SPEC = ("invalid-spec", 422, "Invalid job spec", "`errors` lists everything that is wrong with it.")
    INVALID_PATCH = ("invalid-patch", 422, "Invalid change", "The change, or the spec that it would make, is invalid.")
    INVALID_CURSOR = ("invalid-cursor", 400, "Invalid cursor", "Pass `next_cursor` of a page as it is, or none.")
    IDEMPOTENCY_CONFLICT = (
        "idempotency-conflict",
        409,
        "Idempotency key used for something else",
        "The same Idempotency-Key came with another spec before. Use a new key for a new job.",
    )
    PRECONDITION_FAILED = (
        "precondition-failed",
        412,
        "The job has changed",
        "If-Match does not name the job's current ETag. Read it again, then decide.",
    )
    JOB_ENDED = ("job-ended", 409, "The job has ended", "Jobs that have ended can be read, not changed.")
    REQUEST_CONFLICT = (
        "request-conflict",
        409,
        "Not possible now",
        "The present state of the job, or of the node, does not allow this.",
    )
    NODE_NOT_FOUND = ("node-not-found", 404, "No such node", "GET /v1/nodes lists those of the cluster.")
    CODE_MISMATCH = (
        "code-mismatch",
        422,
        "The archive is not what its name says",
        "The sha256 of the body differs from the one in the path, or the body is not a sound zip archive.",
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
        "A web page of another origin tried to change something.",
    )
    NOT_READY = ("not-ready", 503, "Not ready", "The store or the cluster cannot be reached; see errors.")
    STORE_UNAVAILABLE = (
        "store-unavailable",
        503,
        "The store cannot be reached",
        "The database did not answer, or is locked. Try again.",
    )
    INTERNAL = (
        "internal-error",
        500,
        "Internal error",
        "A fault of the service. Its log holds the cause under `error_id`.",
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
