"""Tokens and sessions: shown once, checked in each request, ended by expiry and revocation, also in a stream."""

import asyncio
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal_api.client import Client, Forbidden, NotFound, Unauthenticated
from shoal_api.http.access.authentication import Authenticator
from shoal_service.access_views import TokenRequest
from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.access import Principal, Role, hash_secret
from shoal_service.store import Store, access


def status_of(service: Any, token: str | None, path: str = "/v1/jobs") -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.get(f"{service.url}{path}", headers=headers, trust_env=False).status_code


def test_a_request_without_a_valid_token_is_refused_with_the_way_out(service: Any) -> None:
    answer = httpx.get(f"{service.url}/v1/jobs", trust_env=False)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == 'Bearer realm="shoal"'
    assert "shoal login" in answer.json()["detail"]
    for header in ("Bearer nonsense", "Bearer shoal_00000000_" + "a" * 43, "Basic dTpw", "Bearer"):
        answer = httpx.get(f"{service.url}/v1/jobs", headers={"Authorization": header}, trust_env=False)
        assert answer.status_code == 401, header


def test_what_needs_no_token_refuses_one_that_is_not_valid(service: Any) -> None:
    assert status_of(service, None, "/healthz") == 200
    assert status_of(service, "nonsense", "/healthz") == 401


def test_a_token_is_shown_once_and_kept_as_its_hash(service: Any) -> None:
    made = service.client.create_token(TokenRequest(name="ada", role=Role.OPERATOR, projects=("vision",)))
    assert status_of(service, made.token) == 200
    listed = next(token for token in service.client.tokens() if token.id == made.id)
    assert listed.model_dump() == made.model_dump(exclude={"token"})
    assert (listed.name, listed.role, listed.projects, listed.created_by) == (
        "ada",
        "operator",
        ("vision",),
        "bootstrap",
    )
    assert listed.expires_at is not None and listed.expires_at == pytest.approx(time.time() + 90 * 86400, abs=60)
    database = Path(service.store._database.url.database)
    stored = database.read_bytes() + Path(f"{database}-wal").read_bytes()
    assert hash_secret(made.token).encode() in stored and made.token.encode() not in stored
    assert made.token[len("shoal_00000000_") :].encode() not in stored


def test_a_revoked_token_ends_at_once(service: Any) -> None:
    made = service.client.create_token(TokenRequest(name="gone"))
    with Client(service.url, token=made.token) as client:
        assert client.whoami().name == "gone"
        service.client.revoke_token(made.id)
        with pytest.raises(Unauthenticated):
            client.whoami()
    with pytest.raises(NotFound):
        service.client.revoke_token("00000000")


def test_an_expired_token_is_refused(service: Any) -> None:
    request = TokenRequest(name="past", expires_in_s=5.0)
    made = service.store.writing(access.create_token)(request, by="test", now=time.time() - 10)
    assert status_of(service, made.token) == 401


def test_a_token_that_another_process_revokes_is_valid_for_five_more_seconds(store: Store) -> None:
    made = store.writing(access.create_token)(TokenRequest(name="cached"), by="test", now=1.0)
    mono = 100.0
    authenticator = Authenticator(store, clock=lambda: 2.0, mono=lambda: mono)

    async def principals() -> list[Principal | None]:
        nonlocal mono
        before = await authenticator.authenticate_bearer(made.token)
        store.writing(access.revoke_token)(made.id, now=2.0)
        mono = 104.9
        cached = await authenticator.authenticate_bearer(made.token)
        mono = 105.1
        return [before, cached, await authenticator.authenticate_bearer(made.token)]

    before, cached, after = asyncio.run(principals())
    assert before is not None and cached == before and after is None


def test_the_last_use_is_written(run_service: Any, store: Store) -> None:
    made = store.writing(access.create_token)(TokenRequest(name="used"), by="test", now=time.time())
    with run_service(store) as service:
        assert status_of(service, made.token) == 200
    assert store.reading(access.get_token)(made.id).last_used_at == pytest.approx(time.time(), abs=60)


def test_the_owners_token_is_written_kept_adopted_and_replaced(store: Store, tmp_path: Path) -> None:
    path = ensure_admin_token(store, tmp_path, now=1.0)
    first = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    principal = store.reading(access.find_principal_by_token)(first.strip(), now=1e9)
    assert principal is not None and principal.role is Role.ADMIN and principal.projects is None
    assert ensure_admin_token(store, tmp_path, now=2.0).read_text() == first

    other = Store.open(f"sqlite:///{tmp_path}/other.db")
    assert ensure_admin_token(other, tmp_path, now=3.0).read_text() == first, "a new database takes the file's token"
    other.close()

    path.chmod(0o644)
    second = ensure_admin_token(store, tmp_path, now=4.0).read_text()
    assert second != first, "others could read it"
    store.writing(access.revoke_token)(second[6:14], now=5.0)
    third = ensure_admin_token(store, tmp_path, now=6.0).read_text()
    assert third != second and store.reading(access.find_principal_by_token)(third.strip(), now=7.0) is not None
    assert [path.name for path in tmp_path.glob("admin-token*")] == ["admin-token"]


def person(service: Any, name: str, **fields: Any) -> Any:
    """A token that an admin has made."""
    return service.client.create_token(
        TokenRequest(**{"name": name, "role": Role.OPERATOR, "personal": True, **fields})
    )


def test_a_person_makes_lists_and_revokes_tokens_and_nobody_elses(service: Any) -> None:
    ada, eve = person(service, "marie", projects=("vision",)), person(service, "sofia")
    with Client(service.url, token=ada.token) as client, Client(service.url, token=eve.token) as other:
        me = client.whoami()
        assert me.makes_tokens and "tokens:own" in me.permissions and "tokens:manage" not in me.permissions
        made = client.create_token(TokenRequest(name="laptop", role=Role.VIEWER, expires_in_s=3600.0))
        assert (made.name, made.projects, made.user, made.parent) == ("marie/laptop", ("vision",), "marie", ada.id)
        assert [token.id for token in client.tokens()] == [made.id, ada.id]
        assert {token.id for token in other.tokens()} == {eve.id}
        for strange in (ada.id, made.id):
            with pytest.raises(NotFound):
                other.revoke_token(strange)
        with Client(service.url, token=made.token) as child:
            assert child.whoami().name == "marie/laptop" and not child.whoami().makes_tokens
            assert {token.id for token in child.tokens()} == {made.id}
            with pytest.raises(Forbidden, match="made for a program"):
                child.create_token(TokenRequest(name="more"))
            with pytest.raises(NotFound):
                child.revoke_token(ada.id)
            client.revoke_token(made.id)
            with pytest.raises(Unauthenticated):
                child.whoami()


def test_a_token_for_a_program_makes_no_other_and_may_end_itself(service: Any) -> None:
    program = person(service, "ci", personal=False)
    person(service, "nightly", user="ci")
    with Client(service.url, token=program.token) as client:
        assert not client.whoami().makes_tokens
        with pytest.raises(Forbidden, match="shoal token create NAME --personal"):
            client.create_token(TokenRequest(name="more"))
        assert [token.id for token in client.tokens()] == [program.id]
        client.revoke_token(program.id)
        with pytest.raises(Unauthenticated):
            client.whoami()


@pytest.mark.parametrize(
    "request_of",
    [
        {"role": Role.ADMIN},
        {"projects": ("vision", "biology")},
        {"user": "root"},
        {"personal": True},
    ],
)
def test_more_than_the_person_has_is_refused(service: Any, request_of: dict[str, Any]) -> None:
    ada = person(service, "bound", projects=("vision",))
    with Client(service.url, token=ada.token) as client, pytest.raises(Forbidden):
        client.create_token(TokenRequest(**{"name": "more", **request_of}))


def test_what_a_token_made_ends_with_it(service: Any) -> None:
    ada = person(service, "short", expires_in_s=7200.0)
    with Client(service.url, token=ada.token) as client:
        made = client.create_token(TokenRequest(name="longer", expires_in_s=None))
        assert made.expires_at == ada.expires_at
    with Client(service.url, token=made.token) as child:
        assert child.whoami().name == "short/longer"
        service.client.revoke_token(ada.id)
        with pytest.raises(Unauthenticated):
            child.whoami()
    assert next(token for token in service.client.tokens() if token.id == made.id).revoked_at is not None


def test_a_token_that_was_made_while_its_maker_was_revoked_is_not_valid(service: Any) -> None:
    """The revocation did not see its row, as if both transactions ran at the same time."""
    store, now = service.store, time.time()
    ada = store.writing(access.create_token)(TokenRequest(name="racer", personal=True), by="test", now=now)
    principal = store.reading(access.find_principal_by_token)(ada.token, now=now)
    store.writing(access.revoke_token)(ada.id, now=now)
    made = store.writing(access.create_own_token)(TokenRequest(name="late"), principal, now=now)
    assert store.reading(access.get_token)(made.id).revoked_at is None
    assert store.reading(access.find_principal_by_token)(made.token, now=now) is None


def test_revoking_the_token_of_the_own_session_logs_out(service: Any) -> None:
    ada = person(service, "leaver")
    with httpx.Client(base_url=service.url, timeout=30, trust_env=False) as http:
        csrf = http.post("/v1/session", json={"token": ada.token}).json()["csrf_token"]
        answer = http.delete(f"/v1/tokens/{ada.id}", headers={"X-CSRF-Token": csrf})
        assert answer.status_code == 200 and "shoal-session" in answer.headers["set-cookie"]
        assert not http.cookies
        assert http.get("/v1/whoami").status_code == 401


def test_the_audit_names_whose_token_it_was(service: Any) -> None:
    ada = person(service, "shared")
    with Client(service.url, token=ada.token) as client:
        made = client.create_token(TokenRequest(name="script", role=Role.VIEWER))
    with Client(service.url, token=made.token) as child, pytest.raises(Forbidden):
        child.cancel("job-unknown")
    refused = next(one for one in service.client.audit(actor="shared/script").items)
    assert (refused.token_id, refused.outcome) == (made.id, "forbidden")


@pytest.fixture
def browser(service: Any) -> Iterator[httpx.Client]:
    """Keeps cookies, and shows no token."""
    with httpx.Client(base_url=service.url, timeout=30, trust_env=False) as http:
        yield http


def log_in(service: Any, browser: httpx.Client) -> tuple[str, str]:
    """Log a browser in with a new token. Returns the id of the token, and the CSRF token of the session."""
    request = TokenRequest(name="ada", role=Role.OPERATOR)
    made = service.store.writing(access.create_token)(request, by="test", now=time.time())
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
    made = service.store.writing(access.create_token)(request, by="test", now=time.time() - 3.5)
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
