"""Sends requests over a pool of HTTP connections, retries the idempotent ones, and follows event streams across broken
connections.

A request is repeated if the connection fails or the service returns 503, with exponential back-off and jitter, and
after 429; not before the time that the answer names in Retry-After. It is not repeated after a failure if the caller
passes `idempotent=False`. A followed stream yields every event once and in order. The token is sent to the base URL
alone: redirects are not followed. Thread-safe, as httpx.Client is.
"""

from __future__ import annotations

import random
import ssl
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shoal_api.client.errors import Disconnected, ServerError, parse_error, parse_retry_after_s
from shoal_workers.contract.backoff import backoff_s

_UNAVAILABLE = 503
_TOO_MANY = 429
_LONG_POLL_MARGIN_S = 10.0
_STREAM_SILENCE_S = 45.0
"""The service sends a heartbeat every 15 s; a stream without data for this long is broken."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of retries of an idempotent request, and their delays: `first_s` x 2^n, at most `most_s` seconds."""

    num_retries: int = 5
    first_s: float = 0.1
    most_s: float = 3.0

    def delay_s(self, failures: int, spread: float) -> float:
        """Return the delay after `failures` failures in a row; a random `spread` in [0, 1) keeps clients apart."""
        return backoff_s(failures + 1, first_s=self.first_s, longest_s=self.most_s, spread=spread)


DEFAULT_RETRY = RetryPolicy()


@dataclass(frozen=True, slots=True)
class Credentials:
    """The token of a client, and the authorities of the server's certificate."""

    find_token: Callable[[], str | None]
    """Called until it finds one: a server that starts writes its owner's token only after its port is open."""
    ca_file: Path | None
    """Certificates, in PEM, of authorities that the server's may come from; None for the usual ones."""


class Transport:
    def __init__(self, base_url: str, timeout_s: float, retry: RetryPolicy, credentials: Credentials) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._retry = retry
        token = credentials.find_token()
        headers = _authorization(token) if token is not None else {}
        auth = _LaterToken(credentials.find_token) if token is None else None
        verify = certificates(self.base_url, credentials.ca_file)
        self._http = httpx.Client(
            base_url=self.base_url, timeout=timeout_s, trust_env=False, headers=headers, auth=auth, verify=verify
        )
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()
        self._http.close()

    def pause(self, seconds: float) -> bool:
        """Wait; return False at once if the client is closed."""
        return not self._closed.wait(seconds)

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        idempotent: bool = True,
        wait_s: float = 0.0,
    ) -> httpx.Response:
        """Send a request and return the response, whose status is below 400.

        Raises:
            ApiError: the status is 400 or above.
            Disconnected: no response after all retries.
        """
        timeout_s = max(self._timeout_s, wait_s + _LONG_POLL_MARGIN_S) if wait_s else self._timeout_s
        failures = 0
        while True:
            try:
                response = self._http.request(
                    method, path, params=_given(params), headers=headers, content=content, timeout=timeout_s
                )
            except httpx.TransportError as error:
                # without a connection nothing was sent, so even a request that is not idempotent may be repeated
                if not (idempotent or isinstance(error, httpx.ConnectError)) or failures >= self._retry.num_retries:
                    raise Disconnected(self.base_url, describe_failure(error)) from error
            else:
                if response.status_code < 400:
                    return response
                # after 429 nothing was done
                again = response.status_code == _TOO_MANY or (idempotent and response.status_code == _UNAVAILABLE)
                if not again or failures >= self._retry.num_retries:
                    raise parse_error(response)
                if response.status_code == _TOO_MANY or "Retry-After" in response.headers:
                    self._closed.wait(parse_retry_after_s(response))  # not a sleep: `close` ends it
            self.back_off(failures)
            failures += 1

    @contextmanager
    def stream(self, path: str, params: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Open a stream. A failing connection raises httpx.TransportError, at the start or during reading."""
        timeout = httpx.Timeout(self._timeout_s, read=_STREAM_SILENCE_S)
        with self._http.stream("GET", path, params=_given(params), headers=headers, timeout=timeout) as response:
            if response.status_code >= 400:
                response.read()
                raise parse_error(response)
            yield response

    def back_off(self, failures: int) -> None:
        """Wait before a retry; returns early if the client is closed."""
        self._closed.wait(self._retry.delay_s(failures, random.random()))

    def gives_up(self, failures: int) -> bool:
        return failures > self._retry.num_retries or self._closed.is_set()


def certificates(url: str, ca_file: Path | None) -> ssl.SSLContext | bool:
    """Return `verify` of httpx for a server. For plain HTTP no certificates are read, which takes 40 ms."""
    return not url.lower().startswith("http:") if ca_file is None else ssl.create_default_context(cafile=ca_file)


def _authorization(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class _LaterToken(httpx.Auth):
    """A client that was made before there was a token looks for it at each request until it finds one."""

    def __init__(self, find: Callable[[], str | None]) -> None:
        self._find = find
        self._token: str | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if self._token is None:
            self._token = self._find()
        if self._token is not None:
            request.headers.update(_authorization(self._token))
        yield request


def _given(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (params or {}).items() if value is not None}


def describe_failure(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    id: str
    event: str
    data: str


def follow_stream(transport: Transport, path: str, params: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
    """Yield all events of a numbered stream until its `end` event, which is not yielded.

    A broken stream is reopened after the last number that was yielded (Last-Event-ID). The function gives up after
    several failures in a row without an event in between.

    Raises:
        ApiError, Disconnected
    """
    last_id = 0
    failures = 0
    while True:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(last_id)} if last_id else {})
        cause = "the stream ended early"
        try:
            with transport.stream(path, params=params, headers=headers) as response:
                for event in parse_stream(split_lines(response.iter_bytes())):
                    if event.event == "end":
                        return
                    failures = 0
                    if event.id:
                        if int(event.id) <= last_id:
                            continue
                        last_id = int(event.id)
                    yield event
        except httpx.TransportError as error:
            cause = describe_failure(error)
        except ServerError as error:
            if error.problem.status != 503:
                raise
            cause = error.problem.title
        failures += 1
        if transport.gives_up(failures):
            raise Disconnected(transport.base_url, cause)
        transport.back_off(failures)


def parse_stream(lines: Iterator[str]) -> Iterator[ServerSentEvent]:
    """Parse a stream as the WHATWG HTML standard (9.2.6) defines it; an incomplete event at the end is dropped."""
    event_id, event = "", ""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield ServerSentEvent(event_id, event or "message", "\n".join(data))
            event, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            event = value
        elif field == "id":
            event_id = value


def split_lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Split at LF only: the text may contain other characters that Unicode defines as line ends."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode()
