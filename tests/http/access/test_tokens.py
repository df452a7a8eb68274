"""Tokens: shown once, checked in each request, ended by expiry and revocation; and the owner's token in its file."""

import asyncio
import stat
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal_api.client import Client, NotFound, Unauthenticated
from shoal_api.http.access.authentication import Authenticator
from shoal_service.access_views import TokenRequest
from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.access import Principal, Role, hash_of
from shoal_service.store import Store, credentials


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
    listed = next(one for one in service.client.tokens() if one.id == made.id)
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
    assert hash_of(made.token).encode() in stored and made.token.encode() not in stored
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
    made = service.store.writing(credentials.create_token)(request, by="test", now=time.time() - 10)
    assert status_of(service, made.token) == 401


def test_a_token_that_another_process_revokes_is_valid_for_five_more_seconds(store: Store) -> None:
    made = store.writing(credentials.create_token)(TokenRequest(name="cached"), by="test", now=1.0)
    mono = 100.0
    authenticator = Authenticator(store, clock=lambda: 2.0, mono=lambda: mono)

    async def principals() -> list[Principal | None]:
        nonlocal mono
        before = await authenticator.of_bearer(made.token)
        store.writing(credentials.revoke_token)(made.id, now=2.0)
        mono = 104.9
        cached = await authenticator.of_bearer(made.token)
        mono = 105.1
        return [before, cached, await authenticator.of_bearer(made.token)]

    before, cached, after = asyncio.run(principals())
    assert before is not None and cached == before and after is None


def test_the_last_use_is_written(run_service: Any, store: Store) -> None:
    made = store.writing(credentials.create_token)(TokenRequest(name="used"), by="test", now=time.time())
    with run_service(store) as service:
        assert status_of(service, made.token) == 200
    assert store.reading(credentials.get_token)(made.id).last_used_at == pytest.approx(time.time(), abs=60)


def test_the_owners_token_is_written_kept_adopted_and_replaced(store: Store, tmp_path: Path) -> None:
    path = ensure_admin_token(store, tmp_path, now=1.0)
    first = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = store.reading(credentials.principal_of_token)(first.strip(), now=1e9)
    assert found is not None and found.role is Role.ADMIN and found.projects is None
    assert ensure_admin_token(store, tmp_path, now=2.0).read_text() == first

    other = Store.open(f"sqlite:///{tmp_path}/other.db")
    assert ensure_admin_token(other, tmp_path, now=3.0).read_text() == first, "a new database takes the file's token"
    other.close()

    path.chmod(0o644)
    second = ensure_admin_token(store, tmp_path, now=4.0).read_text()
    assert second != first, "others could read it"
    store.writing(credentials.revoke_token)(second[6:14], now=5.0)
    third = ensure_admin_token(store, tmp_path, now=6.0).read_text()
    assert third != second and store.reading(credentials.principal_of_token)(third.strip(), now=7.0) is not None
    assert [path.name for path in tmp_path.glob("admin-token*")] == ["admin-token"]
