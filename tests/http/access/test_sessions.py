"""The page's session: a cookie that scripts cannot read, a token against forged requests, links that work once."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.store import credentials


@pytest.fixture
def browser(service: Any) -> Iterator[httpx.Client]:
    """Keeps cookies, and shows no token."""
    with httpx.Client(base_url=service.url, timeout=30, trust_env=False) as http:
        yield http


def log_in(service: Any, browser: httpx.Client) -> tuple[str, str]:
    """Log a browser in with a new token. Returns the id of the token, and the CSRF token of the session."""
    request = TokenRequest(name="ada", role=Role.OPERATOR)
    made = service.store.writing(credentials.create_token)(request, by="test", now=time.time())
    answer = browser.post("/v1/session", json={"token": made.token})
    assert answer.status_code == 201
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Secure" not in cookie
    assert made.token not in cookie
    return made.id, answer.json()["csrf_token"]


def test_a_page_without_a_session_leads_to_the_login_and_back(service: Any, browser: httpx.Client) -> None:
    answer = browser.get("/compare?jobs=a,b")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login#next=%2Fcompare%3Fjobs%3Da%2Cb")
    assert browser.get("/login").status_code == 200
    log_in(service, browser)
    assert browser.get("/compare?jobs=a,b").status_code == 200


def test_reads_streams_and_downloads_need_only_the_cookie(
    service: Any, browser: httpx.Client, spec: dict[str, Any]
) -> None:
    log_in(service, browser)
    job = service.client.submit(spec)
    assert browser.get("/v1/whoami").json()["name"] == "ada"
    assert browser.get(f"/v1/jobs/{job.id}/series?format=csv").text.startswith("step,")
    with browser.stream("GET", f"/v1/jobs/{job.id}", headers={"Accept": "text/event-stream"}) as answer:
        assert answer.status_code == 200


def test_a_change_needs_the_token_against_forged_requests(
    service: Any, browser: httpx.Client, spec: dict[str, Any]
) -> None:
    _, csrf = log_in(service, browser)
    for headers in ({}, {"X-CSRF-Token": "0" * 32}, {"X-CSRF-Token": ""}):
        answer = browser.post("/v1/jobs", json=spec, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "csrf")
    assert browser.get("/v1/whoami").json()["csrf_token"] == csrf
    foreign = {"X-CSRF-Token": csrf, "Origin": "http://evil.example"}
    assert browser.post("/v1/jobs", json=spec, headers=foreign).json()["code"] == "cross-origin"
    assert browser.post("/v1/jobs", json=spec, headers={"X-CSRF-Token": csrf}).status_code == 201


def test_a_link_works_once(service: Any, browser: httpx.Client) -> None:
    link = service.client.session_link()
    assert link.path == f"/login#code={link.code}" and link.expires_at == pytest.approx(time.time() + 120, abs=10)
    assert browser.post("/v1/session", json={"code": link.code}).json()["role"] == "admin"
    again = browser.post("/v1/session", json={"code": link.code})
    assert again.status_code == 401 and "shoal open" in again.json()["detail"]
    assert browser.post("/v1/session", json={"code": "x", "token": "y"}).status_code == 422


def test_a_session_ends_with_its_token_and_by_logging_out(service: Any, browser: httpx.Client) -> None:
    token_id, _ = log_in(service, browser)
    service.client.revoke_token(token_id)
    assert browser.get("/v1/whoami").status_code == 401
    _, csrf = log_in(service, browser)
    kept = dict(browser.cookies)
    assert browser.delete("/v1/session", headers={"X-CSRF-Token": csrf}).status_code == 204
    with httpx.Client(base_url=service.url, cookies=kept, trust_env=False) as thief:
        assert thief.get("/v1/whoami").status_code == 401, "the cookie is of no use after the logout"
