"""Reads the bodies of requests: media type, size, encoding, and the document that they hold.

Hostile requests end early: 415 before anything is read, 413 before too much is read. Job specs are parsed by
`control/spec_io.py`, for the command line too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from shoal_api.http.access.limits import Limiter, SizeLimit
from shoal_api.http.access.request_scope import LIMITER
from shoal_api.http.problems import BadDocument, BodyTooLarge, InvalidRequest, UnsupportedMediaType
from shoal_service.control.spec_io import Lines, SpecFormat, decode, parse_document
from shoal_service.problems import ServiceError
from shoal_service.telemetry.tallies import Limit
from shoal_workers.contract import JobSpec
from shoal_workers.contract.checks.spec_errors import SpecError, validation_problems

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
    document, lines = await _decode(request, SpecFormat.YAML if media_type in YAML_TYPES else SpecFormat.JSON)
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
        document, _ = await _decode(request, SpecFormat.JSON)
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


async def _decode(request: Request, spec_format: SpecFormat) -> tuple[Any, Lines]:
    """Read and parse the body, on a thread because a large document takes long enough to delay other requests."""
    text = _decode_utf8(await read_body(request, Limit.BODY_BYTES))
    try:
        return await run_in_threadpool(decode, text, spec_format)
    except SpecError as error:
        raise BadDocument(str(error), error.problems) from None


def require_media_type(request: Request, media_types: tuple[str, ...]) -> str:
    given = request.headers.get("content-type", "")
    media_type = given.partition(";")[0].strip().lower()
    if media_type not in media_types:
        problem = f"is {given[:80]!r}" if given else "is missing"
        raise UnsupportedMediaType(f"Content-Type {problem}; use {' or '.join(media_types)}.")
    return media_type


async def read_body(request: Request, limit: SizeLimit | int) -> bytes:
    """Read the body. Raises BodyTooLarge if it exceeds the limit: a setting, or a number of bytes."""
    limiter: Limiter = request.scope[LIMITER]
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit():
        limiter.require_size(int(declared[:20]), limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        limiter.require_size(len(body), limit)
    return bytes(body)


async def require_no_body(request: Request) -> None:
    """Raises BodyTooLarge if the request has a body."""
    async for chunk in request.stream():
        if chunk:
            raise BodyTooLarge("This request has no body.")


def _decode_utf8(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument(f"The body is not UTF-8: byte {error.start} is invalid.") from None
