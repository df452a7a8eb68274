"""Reads the body of a request: media type, size, encoding, and the resource that it describes; and the parameters
`label` and `search` of lists. Refuses parameters that the route does not have. Called by the routes.

Hostile requests end early: 415 before anything is read, 413 before too much is read. Job specs are parsed by
`control/spec_io.py`, for the command line too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from shoal_api.http.access.limits import LIMITER, Limiter, SizeLimit
from shoal_api.http.problems import Kind, ProblemError
from shoal_service.control.spec_io import Lines, SpecFormat, decode, parse_document
from shoal_service.core.selection import MAX_SELECTORS as MAX_SELECTORS
from shoal_service.core.selection import InvalidSelector, LabelSelector
from shoal_service.core.where.language import InvalidCondition, Selection
from shoal_service.telemetry.tallies import Limit
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, unknown_name, validation_problems
from shoal_workers.contract.spec import JobSpec

M = TypeVar("M", bound=BaseModel)
JSON_TYPES = ("application/json",)
PATCH_TYPES = ("application/json", "application/merge-patch+json")
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
LABEL_FORMS = (
    "Only jobs whose labels match: `NAME`, `!NAME`, `NAME=VALUE` or `NAME!=VALUE`. May be repeated; all must match."
)
WHERE_FORMS = (
    'Only jobs for which this holds: `lr > 1e-3 and state == "FAILED" and label.team == "speech"`. Names are those of '
    "`GET /v1/job-fields`; relations are == != < <= > >= ~ in; also and, or, not, parentheses, null, `now - 7d`."
)
SORT_FORMS = (
    "Names to order by, separated by commas; a dash before one: the largest first. Jobs without a value come last."
)
COLUMN_FORMS = "Names whose values each job has in `values`, separated by commas."
ARCHIVED_JOBS = "Also archived jobs. A condition that names `archived` decides itself."
SEARCH_WORDS = "Words, each a part of a name, an id, a project, a user or a label; all must be found."


async def read_spec(request: Request) -> JobSpec:
    """Read a job spec in JSON or YAML.

    Raises:
        SpecError: with everything that is wrong with it as a spec.
        ProblemError: unsupported-media-type, body-too-large, bad-document.
    """
    media_type = require_media_type(request, JSON_TYPES + YAML_TYPES)
    document, lines = await _decoded(request, SpecFormat.YAML if media_type in YAML_TYPES else SpecFormat.JSON)
    return await run_in_threadpool(parse_document, document, lines)


async def read_model(
    request: Request, model: type[M], media_types: tuple[str, ...] = JSON_TYPES, invalid: Kind = Kind.INVALID_REQUEST
) -> M:
    """Read a JSON document as a value of `model`.

    Raises:
        ProblemError: unsupported-media-type, body-too-large, bad-document; `invalid`, with every error, if the document
            does not fit the model.
    """
    require_media_type(request, media_types)
    document, _ = await _decoded(request, SpecFormat.JSON)
    try:
        return await run_in_threadpool(model.model_validate, document)
    except ValidationError as error:
        problems = await run_in_threadpool(validation_problems, model, document, error)
        raise ProblemError(invalid, "The body is not valid; see errors.", problems) from None


async def _decoded(request: Request, spec_format: SpecFormat) -> tuple[Any, Lines]:
    """Read and parse the body, on a thread because a large document takes long enough to delay other requests."""
    text = _text_of(await read_body(request, Limit.BODY_BYTES))
    try:
        return await run_in_threadpool(decode, text, spec_format)
    except SpecError as error:
        raise ProblemError(Kind.BAD_DOCUMENT, str(error), error.problems) from None


def require_media_type(request: Request, media_types: tuple[str, ...]) -> str:
    given = request.headers.get("content-type", "")
    media_type = given.partition(";")[0].strip().lower()
    if media_type not in media_types:
        shown = f"is {given[:80]!r}" if given else "is missing"
        raise ProblemError(Kind.UNSUPPORTED_MEDIA_TYPE, f"Content-Type {shown}; use {' or '.join(media_types)}.")
    return media_type


async def read_body(request: Request, limit: SizeLimit) -> bytes:
    """Read the body. Raises ProblemError if it is larger than the limit."""
    limiter: Limiter = request.scope[LIMITER]
    found = await _up_to(request, limiter.most_bytes(limit))
    if found is None:
        raise limiter.too_large(limit)
    return found


async def read_at_most(request: Request, max_bytes: int) -> bytes:
    """Read the body of a route whose limit is no setting. Raises ProblemError if the body is larger."""
    found = await _up_to(request, max_bytes)
    if found is None:
        raise ProblemError(Kind.BODY_TOO_LARGE, f"The body has more than {max_bytes} bytes.")
    return found


async def _up_to(request: Request, max_bytes: int) -> bytes | None:
    """Read the body; None if it is larger."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        return None
    chunks = bytearray()
    async for chunk in request.stream():
        chunks += chunk
        if len(chunks) > max_bytes:
            return None
    return bytes(chunks)


async def require_no_body(request: Request) -> None:
    """Raises ProblemError if the request has a body."""
    async for chunk in request.stream():
        if chunk:
            raise ProblemError(Kind.BODY_TOO_LARGE, "This request has no body.")


def _text_of(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProblemError(Kind.BAD_DOCUMENT, f"The body is not UTF-8: byte {error.start} is invalid.") from None


async def refuse_unknown_query(request: Request) -> None:
    """A dependency of every route: a parameter with a spelling mistake must not be ignored.

    Raises:
        ProblemError: invalid-request, with the nearest parameter that the route has.
    """
    if not request.query_params:
        return
    known = {one.alias for one in request.scope["route"].dependant.query_params}
    errors = tuple(
        SpecProblem(path=f"query.{name[:80]}", message=unknown_name("parameter", name, known))
        for name in request.query_params.keys() - known
    )
    if errors:
        raise ProblemError(Kind.INVALID_REQUEST, "; ".join(error.message for error in errors[:3]), errors)


def selection_of(where: str, sort: str, columns: str, *, archived: bool, now: float) -> Selection:
    """Parse what selects and orders jobs. Raises ProblemError, whose detail shows the place of the mistake."""
    try:
        return Selection.parse(where, sort, columns, with_archived=archived, now=now)
    except InvalidCondition as error:
        raise ProblemError(Kind.INVALID_REQUEST, str(error)) from None


def selectors_of(texts: Sequence[str]) -> tuple[LabelSelector, ...]:
    """Parse the values of the parameter `label`. Raises ProblemError."""
    try:
        return tuple(LabelSelector.parse(text) for text in texts)
    except InvalidSelector as error:
        raise ProblemError(Kind.INVALID_REQUEST, str(error)) from None
