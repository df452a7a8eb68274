"""Verifies JWTs of an OpenID Connect issuer: signature by the keys that it publishes, issuer, audience, and time.

The keys are read from the issuer's discovery document, by one task at a time and at most every ten seconds, so that
made-up tokens make no requests and hold no thread. Keys are read again after an hour, and for a key that is not known.
While the issuer is away, known keys stay valid for a day. Only asymmetric algorithms are accepted: `none` and those
with a shared secret never are. Called by the HTTP edge, on its event loop.
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

from shoal_service.core.access import ClaimRules, ClaimsRefused, Principal, principal_of
from shoal_service.telemetry.tallies import WaitTallies

_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_KEPT_S = 3600.0
_VALID_S = 24 * 3600.0
"""Keys that cannot be read again are used for this long after they were read."""
_AGAIN_S = 10.0
_LEEWAY_S = 30
_TIMEOUT_S = 5.0
"""Limit for the two requests to the issuer together."""
_log = logging.getLogger(__name__)


class IssuerAway(Exception):
    """The issuer's keys cannot be read."""


class JwtRefused(ValueError):
    """The token gives no access; the message says why, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerConfig:
    issuer: str
    audience: str
    rules: ClaimRules = field(default_factory=ClaimRules)


@dataclass(frozen=True, slots=True)
class _Keys:
    of: KeySet
    read_mono: float

    def has(self, kid: Any) -> bool:
        return any(key.kid == kid for key in self.of.keys)


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
        self._away = ""
        """Why the last read failed; empty: it did not fail."""

    async def principal(self, token: str) -> Principal:
        """The principal that the JWT names. Raises JwtRefused, IssuerAway."""
        try:
            kid = extract_compact(token.encode()).headers().get("kid")
        except (JoseError, ValueError) as error:
            raise JwtRefused("it is not a JWT.") from error
        keys = await self._keys_with(kid)
        return await asyncio.to_thread(self._verified, token, keys)

    def _verified(self, token: str, keys: KeySet) -> Principal:
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
            return principal_of(decoded.claims, config.rules)
        except ClaimsRefused as error:
            raise JwtRefused(str(error)) from error
        except (JoseError, ValueError) as error:
            raise JwtRefused(f"{error}.") from error

    async def _keys_with(self, kid: Any) -> KeySet:
        """The known keys. Only a token whose key is not known waits for the issuer."""
        known = self._valid_keys()
        has_key = known is not None and known.has(kid)
        if known is None or not has_key or self._clock_mono() - known.read_mono > _KEPT_S:
            reading = self._begin_reading()
            if reading is not None and not has_key:
                await asyncio.shield(reading)  # others wait for it, too
                known = self._valid_keys()
        if known is None or (self._away and kid is not None and not known.has(kid)):
            raise IssuerAway(self._away or f"The keys of {self._config.issuer} cannot be read.")
        return known.of

    def _valid_keys(self) -> _Keys | None:
        keys = self._keys
        return keys if keys is not None and self._clock_mono() - keys.read_mono <= _VALID_S else None

    def _begin_reading(self) -> asyncio.Task[None] | None:
        """The read that is under way, or a new one; None if the last one ended a moment ago."""
        if self._reading is not None and not self._reading.done():
            return self._reading
        now_mono = self._clock_mono()
        if self._tried_mono is not None and now_mono - self._tried_mono <= _AGAIN_S:
            return None
        self._tried_mono = now_mono
        self._reading = asyncio.create_task(self._read())
        return self._reading

    async def _read(self) -> None:
        try:
            async with self._waits.bounded("issuer", _TIMEOUT_S):
                self._keys = _Keys(await self._read_keys(), self._clock_mono())
            self._away = ""
        except TimeoutError:
            self._away = f"The keys of {self._config.issuer} cannot be read: no answer within {_TIMEOUT_S:g} s."
        except (httpx.HTTPError, ValueError, KeyError, JoseError) as error:
            self._away = f"The keys of {self._config.issuer} cannot be read: {error}."
        self._tried_mono = self._clock_mono()
        if self._away:
            _log.warning("access.issuer_away", extra={"issuer": self._config.issuer, "reason": self._away})

    async def _read_keys(self) -> KeySet:
        issuer = self._config.issuer
        make = partial(httpx.AsyncClient, timeout=_TIMEOUT_S, trust_env=False)
        async with await asyncio.to_thread(make) as http:  # it reads the authorities from files
            response = await http.get(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
            document = response.raise_for_status().json()
            if document.get("issuer") != issuer:
                raise ValueError(f"it says that it is {document.get('issuer')!r}")
            keys = await http.get(_checked(document["jwks_uri"]))
            return KeySet.import_key_set(keys.raise_for_status().json())


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "https" or parts.hostname in ("127.0.0.1", "localhost", "::1"):
        return url
    raise ValueError(f"jwks_uri {url!r} is not https")
