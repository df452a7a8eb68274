"""Verifies JWTs of an OpenID Connect issuer: signature by the keys that it publishes, issuer, audience, and time.

The keys are read from the issuer's discovery document, kept for an hour, and read again for a key that is not known: at
most every ten seconds, so that made-up tokens do not make requests. Only asymmetric algorithms are accepted: `none` and
those with a shared secret never are. Called by the HTTP edge, on worker threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from joserfc.jws import extract_compact

from shoal_service.core.access.claims import ClaimRules, ClaimsRefused, principal_of
from shoal_service.core.access.roles import Principal

_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_KEPT_S = 3600.0
_AGAIN_S = 10.0
_LEEWAY_S = 30
_TIMEOUT_S = 5.0


class IssuerAway(Exception):
    """The issuer's keys cannot be read."""


class JwtRefused(ValueError):
    """The token gives no access; the message says why, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerConfig:
    issuer: str
    audience: str
    rules: ClaimRules = field(default_factory=ClaimRules)


class Issuer:
    """Thread-safe."""

    def __init__(self, config: IssuerConfig, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: KeySet | None = None
        self._read_at = 0.0

    def principal(self, token: str) -> Principal:
        """Raises JwtRefused, IssuerAway."""
        try:
            kid = extract_compact(token.encode()).headers().get("kid")
        except (JoseError, ValueError) as error:
            raise JwtRefused("it is not a JWT.") from error
        config = self._config
        try:
            decoded = jwt.decode(token, self._keys_with(kid), algorithms=list(_ALGORITHMS))
            registry = jwt.JWTClaimsRegistry(
                now=lambda: int(self._clock()),
                leeway=_LEEWAY_S,
                iss={"essential": True, "value": config.issuer},
                aud={"essential": True, "value": config.audience},
                exp={"essential": True},
            )
            registry.validate(decoded.claims)
            return principal_of(decoded.claims, config.rules)
        except ClaimsRefused as error:
            raise JwtRefused(str(error)) from error
        except (JoseError, ValueError) as error:
            raise JwtRefused(f"{error}.") from error

    def _keys_with(self, kid: Any) -> KeySet:
        with self._lock:
            age_s = self._clock() - self._read_at
            unknown = self._keys is None or all(key.kid != kid for key in self._keys.keys)
            if self._keys is None or age_s > _KEPT_S or (unknown and age_s > _AGAIN_S):
                self._keys = self._read_keys()
                self._read_at = self._clock()
            return self._keys

    def _read_keys(self) -> KeySet:
        issuer = self._config.issuer
        try:
            with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as http:
                found = http.get(f"{issuer.rstrip('/')}/.well-known/openid-configuration").raise_for_status().json()
                if found.get("issuer") != issuer:
                    raise IssuerAway(f"{issuer} says that it is {found.get('issuer')!r}.")
                return KeySet.import_key_set(http.get(_checked(found["jwks_uri"])).raise_for_status().json())
        except (httpx.HTTPError, ValueError, KeyError, JoseError) as error:
            raise IssuerAway(f"The keys of {issuer} cannot be read: {error}.") from error


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "https" or parts.hostname in ("127.0.0.1", "localhost", "::1"):
        return url
    raise ValueError(f"jwks_uri {url!r} is not https")
