"""Reads a request's body: bounded, and decoded into plain JSON values that every later layer can take.

Hostile documents end here, as 400, 413 or 415: not UTF-8, NaN, lone surrogates, NUL characters, deep nesting, YAML
aliases (a few lines can grow without bound) and values that JSON does not have. What comes out is never validated
against a schema here.
"""

from __future__ import annotations

import json
import math
from typing import Any

import yaml
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from shoal_api.http.problem_types import Kind
from shoal_api.http.problems import ProblemError

MAX_DOCUMENT_BYTES = 1 << 20
JSON_TYPES = ("application/json",)
PATCH_TYPES = ("application/json", "application/merge-patch+json")
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
_MAX_DEPTH = 64
_MAX_NODES = 200_000


async def read_document(request: Request, media_types: tuple[str, ...]) -> Any:
    """The body as plain values.

    Raises:
        ProblemError: unsupported-media-type, body-too-large, bad-document.
    """
    media_type = require_media_type(request, media_types)
    raw = await read_body(request, MAX_DOCUMENT_BYTES)
    if media_type in YAML_TYPES:
        return await run_in_threadpool(decode_yaml, raw)
    return decode_json(raw)


def require_media_type(request: Request, media_types: tuple[str, ...]) -> str:
    given = request.headers.get("content-type", "")
    media_type = given.partition(";")[0].strip().lower()
    if media_type not in media_types:
        shown = f"is {given[:80]!r}" if given else "is missing"
        raise ProblemError(Kind.UNSUPPORTED_MEDIA_TYPE, f"Content-Type {shown}; use {' or '.join(media_types)}.")
    return media_type


async def read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks = bytearray()
    async for chunk in request.stream():
        chunks += chunk
        if len(chunks) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(chunks)


def decode_json(raw: bytes) -> Any:
    try:
        value = json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object_without_repeats
        )
    except UnicodeDecodeError as error:
        raise _bad(f"The body is not UTF-8: byte {error.start} is invalid.") from None
    except RecursionError:
        raise _bad(f"The document is nested deeper than {_MAX_DEPTH} levels.") from None
    except ValueError as error:  # JSONDecodeError, and integers of more digits than Python converts
        raise _bad(f"The body is not valid JSON: {str(error)[:200]}.") from None
    _require_plain(value)
    return value


def decode_yaml(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")
        _require_tame_yaml(text)
        value = yaml.load(text, Loader=yaml.CSafeLoader)
    except UnicodeDecodeError as error:
        raise _bad(f"The body is not UTF-8: byte {error.start} is invalid.") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise _bad(f"The body is not valid YAML: {' '.join(str(error).split())[:300]}.") from None
    _require_plain(value)
    return value


def _require_tame_yaml(text: str) -> None:
    """Look at the event stream first: the loader behind it recurses in C and would overflow the process's stack."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise _bad("YAML anchors and aliases are not accepted here; write the values out, or send JSON.")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise _bad(f"The document is nested deeper than {_MAX_DEPTH} levels.")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _require_plain(root: Any) -> None:
    """Only values that JSON can say and that both databases can store."""
    stack: list[tuple[Any, int]] = [(root, 1)]
    num_nodes = 0
    while stack:
        value, depth = stack.pop()
        num_nodes += 1
        if depth > _MAX_DEPTH:
            raise _bad(f"The document is nested deeper than {_MAX_DEPTH} levels.")
        if num_nodes > _MAX_NODES:
            raise _bad(f"The document has more than {_MAX_NODES} values.")
        if isinstance(value, str):
            _require_plain_text(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise _bad(f"The key {str(key)[:80]!r} is not a string; put it in quotes.")
                _require_plain_text(key)
                stack.append((item, depth + 1))
        elif isinstance(value, list):
            stack.extend((item, depth + 1) for item in value)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise _bad("The document holds a number that is not finite.")
        elif isinstance(value, int):
            if value.bit_length() > 1024:
                raise _bad("The document holds an integer of more than 1024 bits.")
        elif value is not None:
            raise _bad(f"The value {str(value)[:80]!r} has no JSON counterpart; put it in quotes.")


def _require_plain_text(text: str) -> None:
    if "\0" in text:
        raise _bad("The document holds a NUL character.")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise _bad("The document holds half of a UTF-16 surrogate pair, which is not a character.")


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated[:80]!r} appears twice in one object")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _bad(detail: str) -> ProblemError:
    return ProblemError(Kind.BAD_DOCUMENT, detail)


def _too_large(max_bytes: int) -> ProblemError:
    return ProblemError(Kind.BODY_TOO_LARGE, f"The body has more than {max_bytes} bytes.")
