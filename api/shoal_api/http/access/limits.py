"""Limits how much one principal, or one address without a token, may ask at a time. Beyond a limit the answer is 429
with Retry-After, or 413 for a body that is too large.

Counts are of this process and begin anew with it. Every method is called on the event loop.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request
from starlette.types import Scope

from shoal_api.http.access.request_scope import ATTEMPT, PRINCIPAL
from shoal_api.http.problems import BodyTooLarge, TooManyRequests
from shoal_service.control.code_archive import MAX_ARCHIVE_BYTES
from shoal_service.control.spec_io import MAX_SPEC_BYTES
from shoal_service.core.access import Principal, Rate, TokenBuckets
from shoal_service.home import AttemptCaller
from shoal_service.telemetry.tallies import Limit, RequestMetrics

SizeLimit = Literal[Limit.BODY_BYTES, Limit.ARCHIVE_BYTES]
_FAILURES = Rate(per_s=1.0, burst=60.0)
"""The rate of requests with an invalid token that one address may make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much this server accepts. The first three limits apply to each principal, or to each address without a
    token."""

    requests_per_s: float = 200.0
    """Mean rate; ten seconds' worth may come at once."""
    streams: int = 200
    uploads: int = 4
    """Uploads of code archives at the same time."""
    requests_at_once: int = 2000
    """Requests of all principals and addresses together, at the same time."""
    body_bytes: int = MAX_SPEC_BYTES
    """Size of a document."""
    archive_bytes: int = MAX_ARCHIVE_BYTES
    """Size of an uploaded code archive."""


@dataclass(slots=True)
class Limiter:
    limits: Limits
    metrics: RequestMetrics
    clock_mono: Callable[[], float] = time.monotonic
    _requests: TokenBuckets = field(init=False)
    _failures: TokenBuckets = field(init=False)
    _num_open: Counter[tuple[Limit, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        rate = self.limits.requests_per_s
        self._requests = TokenBuckets(Rate(per_s=rate, burst=max(1.0, 10 * rate)))
        self._failures = TokenBuckets(_FAILURES)

    def admit(self, scope: Scope) -> None:
        """Count a request. Raises TooManyRequests if its principal or address has asked too often."""
        wait_s = self._requests.wait_s(_name_caller(scope), self.clock_mono())
        if wait_s:
            raise self._refuse(Limit.REQUESTS, f"{self.limits.requests_per_s:g} requests a second", wait_s)

    def count_failure(self, scope: Scope) -> None:
        """Count a token that was not valid. Raises TooManyRequests if its address has shown too many."""
        wait_s = self._failures.wait_s(_address(scope), self.clock_mono())
        if wait_s:
            raise self._refuse(Limit.FAILURES, f"{_FAILURES.per_s:g} failed logins a second", wait_s)

    def request(self) -> AbstractContextManager[None]:
        """Count a request while it is open. Raises TooManyRequests if too many are open."""
        return self._count_open(Limit.AT_ONCE, "", self.limits.requests_at_once, "requests at the same time")

    def stream(self, scope: Scope) -> AbstractContextManager[None]:
        """Count a stream while it is open. Raises TooManyRequests if its principal or address has too many."""
        return self._count_open(Limit.STREAMS, _name_caller(scope), self.limits.streams, "open streams")

    def upload(self, request: Request) -> AbstractContextManager[None]:
        """Count an upload while it runs. Raises TooManyRequests if its principal or address has too many."""
        caller = _name_caller(request.scope)
        return self._count_open(Limit.UPLOADS, caller, self.limits.uploads, "uploads at the same time")

    def require_size(self, num_bytes: int, limit: SizeLimit | int) -> None:
        """Raise BodyTooLarge if a body exceeds a limit of the settings, or a number of bytes."""
        if isinstance(limit, int):
            if num_bytes > limit:
                raise BodyTooLarge(f"The body has more than {limit} bytes.")
            return
        most = self.limits.body_bytes if limit is Limit.BODY_BYTES else self.limits.archive_bytes
        if num_bytes > most:
            self.metrics.refusals.add(limit)
            raise BodyTooLarge(f"The body has more than {most} bytes (SHOAL_LIMIT_{limit.name}).")

    @contextmanager
    def _count_open(self, limit: Limit, caller: str, most: int, what: str) -> Iterator[None]:
        if self._num_open[limit, caller] >= most:
            raise self._refuse(limit, f"{most} {what}", 1.0)
        self._num_open[limit, caller] += 1
        try:
            yield
        finally:
            self._num_open[limit, caller] -= 1
            if not self._num_open[limit, caller]:
                del self._num_open[limit, caller]

    def _refuse(self, limit: Limit, what: str, wait_s: float) -> TooManyRequests:
        self.metrics.refusals.add(limit)
        detail = f"The limit is {what} (SHOAL_LIMIT_{limit.name}). Nothing was done; try again."
        return TooManyRequests(detail, headers={"Retry-After": str(max(1, math.ceil(wait_s)))})


def _name_caller(scope: Scope) -> str:
    caller: AttemptCaller | None = scope.get(ATTEMPT)
    if caller is not None:
        return f"attempt {caller.job_id} {caller.attempt}"
    principal: Principal | None = scope.get(PRINCIPAL)
    if principal is None:
        return _address(scope)
    # a token and those that it has made count as one, so making tokens raises no limit
    return f"token {principal.parent or principal.token_id}" if principal.token_id else f"user {principal.name}"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return f"address {client[0]}" if client else "address"
