"""Reads the body of a request: media type, size, encoding, and the resource that it describes. Refuses parameters
that the route does not have.

Hostile requests end early: 415 before anything is read, 413 before too much is read. Job specs are parsed by
`control/spec_io.py`, for the command line too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Depends
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from shoal_api.http.access.limits import LIMITER, Limiter, SizeLimit
from shoal_api.http.problems import BadDocument, BodyTooLarge, InvalidRequest, UnsupportedMediaType
from shoal_service.control.spec_io import Lines, SpecFormat, decode, parse_document
from shoal_service.problems import ServiceError
from shoal_service.telemetry.tallies import Limit
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, unknown_name, validation_problems
from shoal_workers.contract.spec import JobSpec

JSON_TYPES = ("application/json",)
PATCH_TYPES = ("application/json", "application/merge-patch+json")
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


async def read_spec(request: Request) -> JobSpec:
    """Read a job spec in JSON or YAML.

    Raises:
        SpecError: with everything that is wrong with it as a spec.
        UnsupportedMediaType, BodyTooLarge, BadDocument
    """
    media_type = require_media_type(request, JSON_TYPES + YAML_TYPES)
    document, lines = await _decoded(request, SpecFormat.YAML if media_type in YAML_TYPES else SpecFormat.JSON)
    return await run_in_threadpool(parse_document, document, lines)


@dataclass(frozen=True, slots=True, eq=False)
class JsonBody:
    """A dependency: the JSON body as a value of `model`.

    Raises:
        UnsupportedMediaType, BodyTooLarge, BadDocument
        `invalid`: with every error, if the document does not fit the model.
    """

    model: type[BaseModel]
    example: dict[str, Any]
    """For the OpenAPI document."""
    media_types: tuple[str, ...] = JSON_TYPES
    required: bool = True
    """False: a request without a body has the defaults of the model."""
    invalid: type[ServiceError] = InvalidRequest

    async def __call__(self, request: Request) -> BaseModel:
        if not self.required and "content-type" not in request.headers:
            await require_no_body(request)
            return self.model()
        require_media_type(request, self.media_types)
        document, _ = await _decoded(request, SpecFormat.JSON)
        try:
            return await run_in_threadpool(self.model.model_validate, document)
        except ValidationError as error:
            problems = await run_in_threadpool(validation_problems, self.model, document, error)
            raise self.invalid("The body is not valid; see errors.", problems) from None


def body(model: type[BaseModel], example: dict[str, Any], **options: Any) -> Any:
    """Return the dependency for a parameter that is the body: `Annotated[UserRules, body(UserRules, {...})]`."""
    return Depends(JsonBody(model, example, **options))


SPEC = JsonBody(
    JobSpec,
    {"name": "tiny", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}},
    (*JSON_TYPES, *YAML_TYPES[:1]),
)
"""Describes the body that `read_spec` reads."""


async def _decoded(request: Request, spec_format: SpecFormat) -> tuple[Any, Lines]:
    """Read and parse the body, on a thread because a large document takes long enough to delay other requests."""
    text = _text_of(await read_body(request, Limit.BODY_BYTES))
    try:
        return await run_in_threadpool(decode, text, spec_format)
    except SpecError as error:
        raise BadDocument(str(error), error.problems) from None


def require_media_type(request: Request, media_types: tuple[str, ...]) -> str:
    given = request.headers.get("content-type", "")
    media_type = given.partition(";")[0].strip().lower()
    if media_type not in media_types:
        shown = f"is {given[:80]!r}" if given else "is missing"
        raise UnsupportedMediaType(f"Content-Type {shown}; use {' or '.join(media_types)}.")
    return media_type


async def read_body(request: Request, limit: SizeLimit) -> bytes:
    """Read the body. Raises BodyTooLarge if it is larger than the limit."""
    limiter: Limiter = request.scope[LIMITER]
    received = await _up_to(request, limiter.most_bytes(limit))
    if received is None:
        raise limiter.too_large(limit)
    return received


async def read_at_most(request: Request, max_bytes: int) -> bytes:
    """Read the body of a route whose limit is no setting. Raises BodyTooLarge if the body is larger."""
    received = await _up_to(request, max_bytes)
    if received is None:
        raise BodyTooLarge(f"The body has more than {max_bytes} bytes.")
    return received


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
    """Raises BodyTooLarge if the request has a body."""
    async for chunk in request.stream():
        if chunk:
            raise BodyTooLarge("This request has no body.")


def _text_of(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument(f"The body is not UTF-8: byte {error.start} is invalid.") from None


async def refuse_unknown_query(request: Request) -> None:
    """A dependency of every route: a parameter with a spelling mistake must not be ignored.

    Raises:
        InvalidRequest: with the nearest parameter that the route has.
    """
    if not request.query_params:
        return
    known = {param.alias for param in request.scope["route"].dependant.query_params}
    errors = tuple(
        SpecProblem(path=f"query.{name[:80]}", message=unknown_name("parameter", name, known))
        for name in request.query_params.keys() - known
    )
    if errors:
        raise InvalidRequest("; ".join(error.message for error in errors[:3]), errors)
