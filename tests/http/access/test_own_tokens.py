"""People make, list and revoke their own tokens; what these may do, and that they end with the token that made them."""

import time
from typing import Any

import httpx
import pytest

from shoal_api.client import Client, Forbidden, NotFound, Unauthenticated
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.store import credentials


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
        assert [one.id for one in client.tokens()] == [made.id, ada.id]
        assert {one.id for one in other.tokens()} == {eve.id}
        for strange in (ada.id, made.id):
            with pytest.raises(NotFound):
                other.revoke_token(strange)
        with Client(service.url, token=made.token) as child:
            assert child.whoami().name == "marie/laptop" and not child.whoami().makes_tokens
            assert {one.id for one in child.tokens()} == {made.id}
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
        assert [one.id for one in client.tokens()] == [program.id]
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
    assert next(one for one in service.client.tokens() if one.id == made.id).revoked_at is not None


def test_a_token_that_was_made_while_its_maker_was_revoked_is_not_valid(service: Any) -> None:
    """The revocation did not see its row, as if both transactions ran at the same time."""
    store, now = service.store, time.time()
    ada = store.writing(credentials.create_token)(TokenRequest(name="racer", personal=True), by="test", now=now)
    principal = store.reading(credentials.principal_of_token)(ada.token, now=now)
    store.writing(credentials.revoke_token)(ada.id, now=now)
    made = store.writing(credentials.create_own_token)(TokenRequest(name="late"), principal, now=now)
    assert store.reading(credentials.get_token)(made.id).revoked_at is None
    assert store.reading(credentials.principal_of_token)(made.token, now=now) is None


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
