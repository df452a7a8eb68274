"""A stream ends when its token was revoked or has expired, and when its session was ended; others go on."""

import time
from typing import Any

import httpx
import pytest

from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.store import credentials

EVENTS = {"Accept": "text/event-stream"}


def _as(service: Any, token: str) -> httpx.Client:
    return httpx.Client(base_url=service.url, timeout=60, trust_env=False, headers={"Authorization": f"Bearer {token}"})


@pytest.mark.parametrize("what", ["events", "logs"])
def test_a_stream_of_a_revoked_token_ends(service: Any, spec: dict[str, Any], what: str) -> None:
    job = service.client.submit(spec)
    service.client.pause(job.id)  # a line of the log
    made = service.client.create_token(TokenRequest(name="eve", role=Role.VIEWER))
    path = f"/v1/jobs/{job.id}/{what}"
    asks: dict[str, Any] = {"params": {"follow": True}} if what == "logs" else {"headers": EVENTS}
    with _as(service, made.token) as eve, eve.stream("GET", path, **asks) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces)
        service.client.revoke_token(made.id)
        assert b"event: end" not in b"".join(pieces), "it ends, though the job goes on"
    with _as(service, made.token) as eve:
        assert eve.get(path).status_code == 401


def test_a_stream_ends_with_its_token_and_others_go_on(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    request = TokenRequest(name="short", role=Role.VIEWER, expires_in_s=5.0)
    made = service.store.writing(credentials.create_token)(request, by="test", now=time.time() - 3.5)
    path = f"/v1/jobs/{job.id}"
    with service.http.stream("GET", path, headers=EVENTS) as own:
        others = own.iter_bytes()
        assert next(others)
        with _as(service, made.token) as short, short.stream("GET", path, headers=EVENTS) as answer:
            assert b"event: end" not in b"".join(answer.iter_bytes())
        service.client.cancel(job.id)
        assert b"event: end" in b"".join(others)


def test_a_stream_of_a_session_ends_with_the_logout(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    token = service.http.headers["Authorization"].removeprefix("Bearer ")
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as page:
        begun = page.post("/v1/session", json={"token": token})
        assert begun.status_code == 201
        with page.stream("GET", f"/v1/jobs/{job.id}", headers=EVENTS) as answer:
            pieces = answer.iter_bytes()
            assert next(pieces)
            csrf = {"X-CSRF-Token": begun.json()["csrf_token"]}
            assert page.delete("/v1/session", headers=csrf).status_code < 300
            assert b"event: end" not in b"".join(pieces)
