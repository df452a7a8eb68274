"""What a receiver gets: the body, and the headers of Standard Webhooks (www.standardwebhooks.com) with the signature.

webhook-id: job-7h2k9m4x1q0p_17           the same in every attempt, and for every hook
webhook-timestamp: 1790000000             of this attempt, seconds since the epoch
webhook-signature: v1,<base64>            HMAC-SHA256 of "<id>.<timestamp>.<body>" with the secret
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic_core import to_json

from shoal_service.views import EventView


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a message says about the job."""

    id: str
    name: str
    project: str
    user: str


def message_id(job_id: str, seq: int) -> str:
    """Id of the message about the event with this number. It has no dot, because dots separate the parts of what is
    signed."""
    return f"{job_id}_{seq}"


def body_of(event: EventView, job: JobFacts) -> bytes:
    """The event as `GET /v1/jobs/{id}/events` shows it, with its id and its job; JSON in UTF-8."""
    shown = event.model_dump(mode="json")
    return to_json({"id": message_id(job.id, event.seq), "job": asdict(job), **shown}, inf_nan_mode="null")


def headers_of(identifier: str, body: bytes, key: bytes, now: float) -> Mapping[str, str]:
    """The headers of an attempt at `now`."""
    timestamp = int(now)
    return {
        "Content-Type": "application/json",
        "User-Agent": "Shoal",
        "webhook-id": identifier,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(identifier, timestamp, body, key),
    }


def signature(identifier: str, timestamp: int, body: bytes, key: bytes) -> str:
    """HMAC-SHA256 (RFC 2104) of id, timestamp and body, in base64, after the version of the scheme."""
    digest = hmac.new(key, f"{identifier}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()
