"""HomeLink: the two requests of a supervisor to the service, and their errors. HttpLink is the real one.

HomeAway         no answer, or not now: try again later
HomeRefused      the service does not accept the token, or the document: it may later, if nothing else helps
HomeReplaced     the attempt has a later supervisor: this one has to end
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl
import threading
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

from pydantic_core import to_json

from shoal_service.home import DirectiveAnswer, Home, HomeReport, ReportReceipt
from shoal_workers.version import VERSION

_CONNECT_S = 2.0
_ANSWER_S = 10.0
"""Seconds in which the answer to a report must come: its transaction may wait for others."""
_REPLACED = 409
_LATER = frozenset({429, 500, 502, 503, 504})
_log = logging.getLogger(__name__)


class HomeAway(Exception):
    """The service does not answer now. `retry_after_s`: when it wants to be asked again; 0: it did not say."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HomeRefused(Exception):
    """The service has answered that it does not do what was asked. The message has its words."""


class HomeReplaced(Exception):
    """The attempt has a later supervisor. The message has the service's words."""


class HomeLink(Protocol):
    """The requests of a supervisor to the service. Each of the two raises HomeAway, HomeRefused or HomeReplaced, and is
    called on a thread of its own."""

    def report(self, report: HomeReport) -> ReportReceipt: ...

    def directive(self, after: int, wait_s: float) -> DirectiveAnswer:
        """Returns when there is a directive with another number than `after`, or after `wait_s` seconds."""

    def hurry(self) -> None:
        """Ends a `directive` that waits, with HomeAway: the service was away meanwhile. From any thread."""


class HttpLink:
    """Sends the requests by HTTP, with one kept-alive connection for the reports and one for the directives."""

    def __init__(self, home: Home, job_id: str, attempt: int) -> None:
        path = f"/v1/jobs/{job_id}/attempts/{attempt}"
        self._reports = _Connection(home, f"{path}/reports")
        self._directives = _Connection(home, f"{path}/directive")

    def report(self, report: HomeReport) -> ReportReceipt:
        # losses that are not finite stay what they are
        body = to_json(report.model_dump(), inf_nan_mode="constants", serialize_unknown=True)
        return ReportReceipt.model_validate(self._reports.ask("POST", "", body, _ANSWER_S), extra="ignore")

    def directive(self, after: int, wait_s: float) -> DirectiveAnswer:
        query = f"?after={after}&wait_s={wait_s:g}"
        answer = self._directives.ask("GET", query, None, wait_s + _ANSWER_S)
        return DirectiveAnswer.model_validate(answer, extra="ignore")

    def hurry(self) -> None:
        self._directives.interrupt()


class _Connection:
    """A kept-alive connection. It is used by one thread, except for `interrupt`."""

    def __init__(self, home: Home, path: str) -> None:
        self._urls = [urlsplit(url.strip()) for url in home.url.split(",") if url.strip()]
        self._path = path
        self._headers = {
            "Authorization": f"Bearer {home.token}",
            "Content-Type": "application/json",
            "User-Agent": f"shoal-supervisor/{VERSION}",
        }
        self._context = _context(home) if any(url.scheme == "https" for url in self._urls) else None
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()
        """Guards `_connection`."""

    def ask(self, method: str, query: str, body: bytes | None, answer_s: float) -> Any:
        """Sends a request and returns the JSON of the answer."""
        connection = self._opened()
        try:
            if connection.sock is None:
                connection.timeout = _CONNECT_S
                connection.connect()
            connection.sock.settimeout(answer_s)
            connection.request(method, f"{self._path}{query}", body, self._headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._next_url()
            raise HomeAway(f"{type(error).__name__}: {error}") from error
        if response.will_close:
            self._close()
        if response.status == 200:
            try:
                return json.loads(raw)
            except ValueError as error:
                raise HomeAway("the answer is no JSON: another server has this address") from error
        words = f"{response.status} {raw[:500].decode('utf-8', 'replace')}"
        if response.status == _REPLACED:
            raise HomeReplaced(words)
        if response.status in _LATER:
            wait = response.headers.get("Retry-After", "")
            raise HomeAway(words, float(wait) if wait.isdigit() else 0.0)
        raise HomeRefused(words)

    def interrupt(self) -> None:
        with self._lock:
            sock = self._connection.sock if self._connection is not None else None
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _opened(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._connection is None:
                url = self._urls[0]
                assert url.hostname is not None
                if url.scheme == "https":
                    self._connection = http.client.HTTPSConnection(url.hostname, url.port, context=self._context)
                else:
                    self._connection = http.client.HTTPConnection(url.hostname, url.port)
            return self._connection

    def _next_url(self) -> None:
        """Changes to the next URL, because another control plane may answer."""
        self._close()
        self._urls.append(self._urls.pop(0))

    def _close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _context(home: Home) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=home.ca or None)
    if home.is_pinned:
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted, whoever issued it
    return context
