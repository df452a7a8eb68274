"""Verifies JWTs of an OpenID Connect issuer: signature, issuer, audience and time.

The issuer publishes its keys. One task at a time reads them, at most every ten seconds, so that made-up tokens make no
requests and hold no thread. Keys are read again after an hour, and when a token names an unknown key. If the issuer is
unreachable, the last keys stay valid for a day. Only asymmetric algorithms are accepted, so `none` and those with a
shared secret are refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from joserfc.jws import extract_compact

from shoal_service.core.access import ClaimRules, JwtRefused, Principal, make_principal
from shoal_service.problems import ServiceError
from shoal_service.telemetry.tallies import WaitTallies

_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_REREAD_S = 3600.0
_VALID_S = 24 * 3600.0
"""Keys that cannot be read again are used for this long after they were read."""
_RETRY_S = 10.0
_LEEWAY_S = 30
_TIMEOUT_S = 5.0
"""Limit for the two requests to the issuer together."""
_log = logging.getLogger(__name__)


class IssuerUnreachable(ServiceError, code="issuer-away", status=503, title="The issuer of tokens does not answer"):
    """The keys of the OpenID Connect issuer cannot be read, so its tokens cannot be checked. Others can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerConfig:
    issuer: str
    audience: str
    rules: ClaimRules = field(default_factory=ClaimRules)


@dataclass(frozen=True, slots=True)
class _Keys:
    key_set: KeySet
    read_mono: float

    def has_id(self, kid: Any) -> bool:
        return any(key.kid == kid for key in self.key_set.keys)


class Issuer:
    """Verifies the JWTs of one issuer. Used on one event loop."""

    def __init__(
        self,
        config: IssuerConfig,
        clock: Callable[[], float] = time.time,
        clock_mono: Callable[[], float] = time.monotonic,
        waits: WaitTallies | None = None,
    ) -> None:
        self._config = config
        self._waits = waits or WaitTallies()
        self._waits.expect("issuer", _TIMEOUT_S)
        self._clock = clock
        self._clock_mono = clock_mono
        self._keys: _Keys | None = None
        self._reading: asyncio.Task[None] | None = None
        self._tried_mono: float | None = None
        self._failure = ""
        """Why the last read failed; empty if it did not."""

    async def verify(self, token: str) -> Principal:
        """Return the principal that the JWT names. Raises JwtRefused, IssuerUnreachable."""
        try:
            kid = extract_compact(token.encode()).headers().get("kid")
        except (JoseError, ValueError) as error:
            raise JwtRefused("it is not a JWT.") from error
        keys = await self._find_keys(kid)
        return await asyncio.to_thread(self._verify_with, keys, token)

    def _verify_with(self, keys: KeySet, token: str) -> Principal:
        config = self._config
        try:
            decoded = jwt.decode(token, keys, algorithms=list(_ALGORITHMS))
            registry = jwt.JWTClaimsRegistry(
                now=lambda: int(self._clock()),
                leeway=_LEEWAY_S,
                iss={"essential": True, "value": config.issuer},
                aud={"essential": True, "value": config.audience},
                exp={"essential": True},
            )
            registry.validate(decoded.claims)
        except (JoseError, ValueError) as error:
            raise JwtRefused(f"{error}.") from error
        return make_principal(decoded.claims, config.rules)

    async def _find_keys(self, kid: Any) -> KeySet:
        """Return the last keys. Only a token whose key is not among them waits for the issuer."""
        keys = self._valid_keys()
        has_key = keys is not None and keys.has_id(kid)
        if keys is None or not has_key or self._clock_mono() - keys.read_mono > _REREAD_S:
            reading = self._start_reading()
            if reading is not None and not has_key:
                await asyncio.shield(reading)  # other tokens wait for it too
                keys = self._valid_keys()
        if keys is None or (self._failure and kid is not None and not keys.has_id(kid)):
            raise IssuerUnreachable(self._failure or f"The keys of {self._config.issuer} cannot be read.")
        return keys.key_set

    def _valid_keys(self) -> _Keys | None:
        keys = self._keys
        return keys if keys is not None and self._clock_mono() - keys.read_mono <= _VALID_S else None

    def _start_reading(self) -> asyncio.Task[None] | None:
        """Return the read that is under way, or start one; None if the last one ended a moment ago."""
        if self._reading is not None and not self._reading.done():
            return self._reading
        now_mono = self._clock_mono()
        if self._tried_mono is not None and now_mono - self._tried_mono <= _RETRY_S:
            return None
        self._tried_mono = now_mono
        self._reading = asyncio.create_task(self._read())
        return self._reading

    async def _read(self) -> None:
        try:
            async with self._waits.bounded("issuer", _TIMEOUT_S):
                self._keys = _Keys(await self._read_keys(), self._clock_mono())
            self._failure = ""
        except TimeoutError:
            self._failure = f"The keys of {self._config.issuer} cannot be read: no answer within {_TIMEOUT_S:g} s."
        except (httpx.HTTPError, ValueError, KeyError, JoseError) as error:
            self._failure = f"The keys of {self._config.issuer} cannot be read: {error}."
        self._tried_mono = self._clock_mono()
        if self._failure:
            _log.warning("access.issuer_away", extra={"issuer": self._config.issuer, "reason": self._failure})

    async def _read_keys(self) -> KeySet:
        issuer = self._config.issuer
        make_client = partial(httpx.AsyncClient, timeout=_TIMEOUT_S, trust_env=False)
        async with await asyncio.to_thread(make_client) as http:  # it reads the authorities from files
            response = await http.get(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
            document = response.raise_for_status().json()
            if document.get("issuer") != issuer:
                raise ValueError(f"it says that it is {document.get('issuer')!r}")
            keys = await http.get(_require_https(document["jwks_uri"]))
            return KeySet.import_key_set(keys.raise_for_status().json())


def _require_https(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "https" or parts.hostname in ("127.0.0.1", "localhost", "::1"):
        return url
    raise ValueError(f"jwks_uri {url!r} is not https")
