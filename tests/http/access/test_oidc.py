"""JWTs of an OpenID Connect issuer that runs here, with real keys: accepted, bound by claims, rotated, and refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OctKey, RSAKey

from shoal_service.control.access.oidc import Issuer, IssuerAway, IssuerConfig, JwtRefused
from shoal_service.core.access.claims import ClaimRules
from shoal_service.core.access.roles import Role

RULES = ClaimRules(
    user_claim="email",
    role_claim="groups",
    roles={"ml-admins": Role.ADMIN, "ml": Role.OPERATOR, "all": Role.VIEWER},
    projects_claim="projects",
)


class LocalIssuer:
    """A discovery document and a set of keys on loopback."""

    def __init__(self) -> None:
        self.keys = [RSAKey.generate_key(2048, {"kid": "first", "use": "sig"})]
        self.num_reads = 0
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith("openid-configuration"):
                    body = {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/keys"}
                else:
                    issuer.num_reads += 1
                    body = KeySet(issuer.keys).as_dict(private=False)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def token(self, key: Any = None, alg: str = "RS256", **claims: Any) -> str:
        key = key or self.keys[-1]
        known = {"iss": self.url, "aud": "shoal", "sub": "1", "email": "ada@lab.org", "groups": ["ml"]}
        known |= {"projects": ["vision"], "exp": int(time.time()) + 300, **claims}
        return jwt.encode({"alg": alg, "kid": key.kid}, {k: v for k, v in known.items() if v is not None}, key, [alg])


@pytest.fixture
def local() -> Iterator[LocalIssuer]:
    issuer = LocalIssuer()
    yield issuer
    issuer.server.shutdown()
    issuer.server.server_close()


@pytest.fixture
def verifier(local: LocalIssuer) -> Issuer:
    return Issuer(IssuerConfig(issuer=local.url, audience="shoal", rules=RULES))


def test_claims_give_name_role_and_projects(local: LocalIssuer, verifier: Issuer) -> None:
    found = verifier.principal(local.token())
    assert (found.name, found.user, found.role, found.projects) == (
        "ada@lab.org",
        "ada@lab.org",
        Role.OPERATOR,
        frozenset({"vision"}),
    )
    assert found.expires_at == pytest.approx(time.time() + 300, abs=10) and found.token_id == ""
    admin = verifier.principal(local.token(groups=["all", "ml-admins", "unknown"]))
    assert (admin.role, admin.projects) == (Role.ADMIN, None)
    assert local.num_reads == 1, "the keys are kept"


Wrong = Callable[[LocalIssuer], str]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda one: one.token(exp=int(time.time()) - 60), "expired"),
        (lambda one: one.token(exp=None), "exp"),
        (lambda one: one.token(nbf=int(time.time()) + 600), "nbf|not_before|valid"),
        (lambda one: one.token(aud="another"), "aud"),
        (lambda one: one.token(iss="https://evil.example"), "iss"),
        (lambda one: one.token(groups=["unknown"]), "gives a role"),
        (lambda one: one.token(email=None), "'email'"),
        (lambda one: one.token(projects=[]), "names no project"),
        (lambda one: one.token(RSAKey.generate_key(2048, {"kid": "first"})), "bad_signature|signature"),
        (lambda one: one.token(OctKey.import_key("0" * 64, {"kid": "first"}), "HS256"), "."),
        (lambda one: unsigned(one.token()), "."),
        (lambda one: "a.b.c", "not a JWT"),
    ],
    ids=[
        "past",
        "endless",
        "early",
        "audience",
        "issuer",
        "role",
        "user",
        "project",
        "forged",
        "hs256",
        "none",
        "junk",
    ],
)
def test_what_is_wrong_is_refused(local: LocalIssuer, verifier: Issuer, wrong: Wrong, why: str) -> None:
    with pytest.raises(JwtRefused, match=why):
        verifier.principal(wrong(local))


def unsigned(token: str) -> str:
    """The same claims under `alg: none`."""
    header = "eyJhbGciOiJub25lIiwia2lkIjoiZmlyc3QifQ"
    return f"{header}.{token.split('.')[1]}."


def test_a_new_key_is_read_and_made_up_ones_make_no_requests(local: LocalIssuer) -> None:
    now = [time.time()]
    verifier = Issuer(IssuerConfig(issuer=local.url, audience="shoal", rules=RULES), clock=lambda: now[0])
    verifier.principal(local.token())
    local.keys.append(ECKey.generate_key("P-256", {"kid": "second", "use": "sig"}))
    with pytest.raises(JwtRefused):
        verifier.principal(local.token(alg="ES256"))  # read a moment ago: not again at once
    now[0] += 11.0
    assert verifier.principal(local.token(alg="ES256")).name == "ada@lab.org"
    made_up = RSAKey.generate_key(2048, {"kid": "made-up"})
    for _ in range(5):
        with pytest.raises(JwtRefused):
            verifier.principal(local.token(made_up))
    assert local.num_reads == 2


def test_an_issuer_that_is_away_or_another_is_named(local: LocalIssuer) -> None:
    elsewhere = Issuer(IssuerConfig(issuer=f"{local.url}/", audience="shoal", rules=RULES))
    with pytest.raises(IssuerAway, match="says that it is"):
        elsewhere.principal(local.token())
    gone = Issuer(IssuerConfig(issuer="http://127.0.0.1:1", audience="shoal", rules=RULES))
    with pytest.raises(IssuerAway, match="cannot be read"):
        gone.principal(local.token())
