"""ETags and conditional requests (RFC 9110, section 13): pure functions of headers.

A job's representation changes with every step, its spec only when a user changes it. So its entity tag has two parts,
`<tag of the spec>.<checksum of the representation>`: If-None-Match compares both (with a new status the answer is not
304), If-Match only the first (a new status does not invalidate an edit of the spec).
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping

from starlette.responses import Response

from shoal_service.views import JobView

_TAG = re.compile(r'(W/)?"([^"]*)"')
_CHECKSUM = re.compile(r"\.[0-9a-f]{8}$")


def entity_tag(spec_tag: str, representation: bytes) -> str:
    """Return the value of the ETag header of a job's representation."""
    return f'"{spec_tag}.{zlib.crc32(representation):08x}"'


def tagged(representation: str, if_none_match: str | None) -> Response:
    """Return the JSON with its checksum as ETag, or 304 if the client has it already."""
    body = representation.encode()
    return answer_unless_unchanged(body, make_etag(body), if_none_match)


def make_etag(body: bytes) -> str:
    """Return the checksum of a body as ETag."""
    return f'"{hashlib.sha256(body).hexdigest()[:16]}"'


def is_unchanged(if_none_match: str, tag: str) -> bool:
    """Return whether the client has this representation, as If-None-Match says (weak comparison)."""
    return if_none_match.strip() == "*" or tag.strip('"') in [tag for _, tag in _tags(if_none_match)]


def spec_tags(if_match: str | None) -> str | None:
    """Return If-Match in the form that the store compares: tags of specs. Tags without quotes are accepted. Weak tags
    match nothing (strong comparison)."""
    if if_match is None:
        return None
    return ", ".join(_CHECKSUM.sub("", tag) for weak, tag in _tags(if_match) if not weak)


def _tags(header: str) -> list[tuple[str, str]]:
    """Return the tags of the header, each as two parts: `W/` if it is weak, and its text."""
    return _TAG.findall(header) or [("", part.strip()) for part in header.split(",")]


def job_response(
    job: JobView, status: int = 200, headers: dict[str, str] | None = None, if_none_match: str | None = None
) -> Response:
    """Return the response with the job and its ETag, or 304 if the client has it already."""
    body = job.model_dump_json().encode()
    return answer_unless_unchanged(body, entity_tag(job.etag, body), if_none_match, status, headers)


def answer_unless_unchanged(
    body: bytes,
    tag: str,
    if_none_match: str | None,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    media_type: str = "application/json",
) -> Response:
    """Return the body with its ETag, or 304 if the client has it already."""
    headers = {"Cache-Control": "no-cache", **(headers or {}), "ETag": tag}
    if status == 200 and if_none_match is not None and is_unchanged(if_none_match, tag):
        return Response(status_code=304, headers=headers)
    return Response(body, status, headers, media_type=media_type)
