"""JWTs of an OpenID Connect issuer that runs here, with real keys: accepted, bound by claims, rotated, and refused."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OctKey, RSAKey

from kit.cases import failed_cases
from kit.served_app import bare_app, served
from shoal_api.client.credentials import find_token
from shoal_service.control.oidc import Issuer, IssuerConfig, IssuerUnreachable
from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.access import ClaimRules, JwtRefused, Principal, Role
from shoal_service.store import Store

RULES = ClaimRules(
    user_claim="email",
    role_claim="groups",
    roles={"ml-admins": Role.ADMIN, "ml": Role.OPERATOR, "all": Role.VIEWER},
    projects_claim="projects",
)


@cache
def rsa_key(kid: str, number: int) -> RSAKey:
    """A key with this id, another one for each number. To make one takes a fifth of a second."""
    return RSAKey.generate_key(2048, {"kid": kid, "use": "sig"})


class LocalIssuer:
    """A discovery document and a set of keys on loopback."""

    def __init__(self) -> None:
        self.keys = [rsa_key("first", 1)]
        self.num_reads = 0
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked.set()
                issuer.answers.wait()
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
    issuer.answers.set()
    issuer.server.shutdown()
    issuer.server.server_close()


@pytest.fixture
def verifier(local: LocalIssuer) -> Issuer:
    return Issuer(IssuerConfig(issuer=local.url, audience="shoal", rules=RULES))


def principal(verifier: Issuer, token: str) -> Principal:
    return asyncio.run(verifier.verify(token))


def test_claims_give_name_role_and_projects(local: LocalIssuer, verifier: Issuer) -> None:
    ada = principal(verifier, local.token())
    assert (ada.name, ada.user, ada.role, ada.projects) == (
        "ada@lab.org",
        "ada@lab.org",
        Role.OPERATOR,
        frozenset({"vision"}),
    )
    assert ada.expires_at == pytest.approx(time.time() + 300, abs=10) and ada.token_id == ""
    admin = principal(verifier, local.token(groups=["all", "ml-admins", "unknown"]))
    assert (admin.role, admin.projects) == (Role.ADMIN, None)
    assert local.num_reads == 1, "the keys are kept"


WRONG: dict[str, tuple[Callable[[LocalIssuer], str], str]] = {
    "past": (lambda issuer: issuer.token(exp=int(time.time()) - 60), "expired"),
    "endless": (lambda issuer: issuer.token(exp=None), "exp"),
    "early": (lambda issuer: issuer.token(nbf=int(time.time()) + 600), "nbf|not_before|valid"),
    "audience": (lambda issuer: issuer.token(aud="another"), "aud"),
    "issuer": (lambda issuer: issuer.token(iss="https://evil.example"), "iss"),
    "role": (lambda issuer: issuer.token(groups=["unknown"]), "gives a role"),
    "user": (lambda issuer: issuer.token(email=None), "'email'"),
    "project": (lambda issuer: issuer.token(projects=[]), "names no project"),
    "forged": (lambda issuer: issuer.token(rsa_key("first", 2)), "bad_signature|signature"),
    "hs256": (lambda issuer: issuer.token(OctKey.import_key("0" * 64, {"kid": "first"}), "HS256"), "."),
    "none": (lambda issuer: unsigned(issuer.token()), "."),
    "junk": (lambda issuer: "a.b.c", "not a JWT"),
}


def test_what_is_wrong_is_refused(local: LocalIssuer, verifier: Issuer) -> None:
    def check(name: str) -> None:
        wrong, why = WRONG[name]
        with pytest.raises(JwtRefused, match=why):
            principal(verifier, wrong(local))

    assert failed_cases(check, WRONG) == {}


def unsigned(token: str) -> str:
    """The same claims under `alg: none`."""
    header = "eyJhbGciOiJub25lIiwia2lkIjoiZmlyc3QifQ"
    return f"{header}.{token.split('.')[1]}."


def test_a_new_key_is_read_and_made_up_ones_make_no_requests(local: LocalIssuer) -> None:
    now = [0.0]
    verifier = Issuer(IssuerConfig(issuer=local.url, audience="shoal", rules=RULES), clock_mono=lambda: now[0])
    principal(verifier, local.token())
    local.keys.append(ECKey.generate_key("P-256", {"kid": "second", "use": "sig"}))
    with pytest.raises(JwtRefused):
        principal(verifier, local.token(alg="ES256"))  # read a moment ago: not again at once
    now[0] += 11.0
    assert principal(verifier, local.token(alg="ES256")).name == "ada@lab.org"
    made_up = rsa_key("made-up", 1)
    for _ in range(5):
        with pytest.raises(JwtRefused):
            principal(verifier, local.token(made_up))
    assert local.num_reads == 2


def test_an_issuer_that_is_away_or_another_is_named(local: LocalIssuer) -> None:
    elsewhere = Issuer(IssuerConfig(issuer=f"{local.url}/", audience="shoal", rules=RULES))
    with pytest.raises(IssuerUnreachable, match="says that it is"):
        principal(elsewhere, local.token())
    gone = Issuer(IssuerConfig(issuer="http://127.0.0.1:1", audience="shoal", rules=RULES))
    with pytest.raises(IssuerUnreachable, match="cannot be read"):
        principal(gone, local.token())


def test_while_the_issuer_is_away_known_keys_stay_valid_for_a_day(local: LocalIssuer) -> None:
    now = [0.0]
    verifier = Issuer(IssuerConfig(issuer=local.url, audience="shoal", rules=RULES), clock_mono=lambda: now[0])
    made_up = local.token(rsa_key("made-up", 1))

    async def live() -> None:
        await verifier.verify(local.token())
        local.server.shutdown()
        local.server.server_close()
        for _ in range(10):
            now[0] += 2 * 3600.0
            assert (await verifier.verify(local.token())).name == "ada@lab.org"
            with pytest.raises(IssuerUnreachable, match="cannot be read"):
                await verifier.verify(made_up)
        now[0] += 4 * 3600.0 + 1
        with pytest.raises(IssuerUnreachable, match="cannot be read"):
            await verifier.verify(local.token())

    asyncio.run(live())


def test_a_silent_issuer_delays_only_tokens_of_unknown_keys(local: LocalIssuer) -> None:
    now = [0.0]
    verifier = Issuer(IssuerConfig(issuer=local.url, audience="shoal", rules=RULES), clock_mono=lambda: now[0])
    made_up = local.token(rsa_key("made-up", 1))

    async def live() -> None:
        await verifier.verify(local.token())
        local.answers.clear()
        now[0] += 11.0
        waiting = [asyncio.create_task(verifier.verify(made_up)) for _ in range(100)]
        local.asked.clear()
        await asyncio.to_thread(local.asked.wait)
        assert (await verifier.verify(local.token())).name == "ada@lab.org"
        assert not any(task.done() for task in waiting)
        now[0] += 11.0
        assert all(
            isinstance(error, IssuerUnreachable) for error in await asyncio.gather(*waiting, return_exceptions=True)
        )
        with pytest.raises(IssuerUnreachable, match="no answer within 5 s"):
            await verifier.verify(made_up)  # said at once: it was asked a moment ago

    asyncio.run(live())
    assert local.num_reads == 1


@pytest.mark.slow
def test_made_up_tokens_hold_no_request_and_count_as_failed(local: LocalIssuer, store: Store, state_dir: Path) -> None:
    ensure_admin_token(store, state_dir, now=time.time())
    local.answers.clear()
    issuer = Issuer(IssuerConfig(issuer=local.url, audience="shoal", rules=RULES))
    made_up = local.token(rsa_key("made-up", 1))
    app = bare_app(store, issuer=issuer)
    own, wrong = ({"Authorization": f"Bearer {token}"} for token in (find_token("http://127.0.0.1:1"), made_up))
    with served(app) as url, ThreadPoolExecutor(80) as pool:
        limits = httpx.Limits(max_connections=100)
        with httpx.Client(base_url=url, timeout=30, trust_env=False, limits=limits) as http:
            answers = [pool.submit(http.get, "/v1/jobs", headers=wrong) for _ in range(80)]
            local.asked.wait()
            assert http.get("/v1/jobs", headers=own).status_code == 200
            counted = Counter(answer.result().status_code for answer in answers)
    assert set(counted) == {503, 429} and counted[429] >= 10, "60 at once, one a second"
