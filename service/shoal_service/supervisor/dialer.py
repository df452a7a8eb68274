"""Dialer: two threads that connect a supervisor with the service, each with its own kept-alive connection.

    reports     outbox -> report -> receipt -> outbox drops what is stored     at once, and at least every second
    directive   long poll -> directive -> supervisor

While the service does not answer, both try again, after pauses that double from 0.1 s to 2 s with jitter, and the
outbox keeps the reports. A report names the last acknowledged item. The receipt's number is authoritative, so a report
whose answer was lost is not stored twice, and a supervisor that was restarted learns what its predecessor has reported.
`HomeLink` has the two requests, `HttpLink` sends them; they raise the errors of `home.py`.
"""

from __future__ import annotations

import http.client
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic_core import to_json

from shoal_service.home import (
    DirectiveAnswer,
    Home,
    HomeReport,
    Rejected,
    ReportReceipt,
    Superseded,
    Unavailable,
    make_context,
    make_error,
)
from shoal_service.supervisor.config import Directive, StaleEpoch
from shoal_service.supervisor.journal import end_replaced_process
from shoal_service.supervisor.protocols import Journal
from shoal_service.supervisor.reporting.reporter import Outbox
from shoal_workers.contract.backoff import backoff_s
from shoal_workers.version import VERSION

_MAX_GAP_S = 1.0
"""Longest time between two reports, so that the service sees that the supervisor runs."""
_PACE_S = 0.1
"""Pause between two reports, so that the steps of a fast job are stored in batches and not in one transaction each."""
_WAIT_S = 20.0
"""Longest wait of the long poll."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_REFUSED_COUNTS = 10
"""A refusal counts as this many failures: the longest pause follows."""

_CONNECT_S = 2.0
_ANSWER_S = 10.0
"""Seconds in which the answer to a report must come: its transaction may wait for others."""
_log = logging.getLogger(__name__)


class Dialer:
    def __init__(
        self,
        link: HomeLink,
        outbox: Outbox,
        journal: Journal,
        direct: Callable[[Directive], None],
        release: Callable[[], None],
        *,
        on_replaced: Callable[[], None] = end_replaced_process,
    ) -> None:
        """
        Args:
            journal: has the incarnation of this supervisor.
            direct: applies a directive; may raise StaleEpoch.
            release: called once, when the end of the attempt is stored.
            on_replaced: must not return; it ends this process, which has a successor.
        """
        self._link = link
        self._outbox = outbox
        self._journal = journal
        self._direct = direct
        self._release = release
        self._on_replaced = on_replaced
        self._is_over = threading.Event()

    def start(self) -> None:
        for target in (self.send_reports, self.poll_directives):
            threading.Thread(target=target, name="home", daemon=True).start()

    def send_reports(self) -> None:
        """Send reports until the end of the attempt is stored."""
        acknowledged, is_first = 0, True
        pauses = _Pauses("reports")
        while True:
            sent_mono = time.monotonic()
            try:
                acknowledged, is_released = self._report(acknowledged, 0.0 if is_first else _MAX_GAP_S)
            except (Unavailable, Rejected) as error:
                self._is_over.wait(pauses.next_s(error))
                if isinstance(error, Rejected):  # the token may have ended because this supervisor has a successor
                    self._journal.require_current()
                continue
            except Superseded as error:
                _log.warning("supervisor.refused", extra={"reason": str(error)})
                self._on_replaced()
                return
            is_first = False
            if pauses.end():
                self._link.retry_now()
            if is_released:
                self._is_over.set()
                self._link.retry_now()
                self._release()
                return
            self._is_over.wait(max(0.0, sent_mono + _PACE_S - time.monotonic()))

    def _report(self, acknowledged: int, wait_s: float) -> tuple[int, bool]:
        """Send one report. Return the number of the last acknowledged item, and True if the attempt's end is stored."""
        items = self._outbox.pull(acknowledged, wait_s)
        reports = items if self._outbox.has_status else None
        receipt = self._link.report(HomeReport(life=self._journal.life, after=acknowledged, reports=reports))
        return receipt.acknowledged, receipt.released

    def poll_directives(self) -> None:
        """Apply directives until the end of the attempt is stored."""
        after = 0
        pauses = _Pauses("directive")
        while not self._is_over.is_set():
            try:
                answer = self._link.directive(after, _WAIT_S)
            except (Unavailable, Rejected) as error:
                self._is_over.wait(pauses.next_s(error))
                continue
            except Superseded:
                return  # the reports have the same answer
            pauses.end()
            if answer.directive is not None:
                after = answer.number
                self._apply(answer.directive)

    def _apply(self, document: object) -> None:
        try:
            self._direct(Directive.model_validate(document, extra="ignore"))
        except StaleEpoch as error:
            _log.warning("supervisor.stale_directive", extra={"error": str(error)})
        except ValidationError as error:
            _log.error("supervisor.unknown_directive", extra={"error": str(error)[:500]})


class _Pauses:
    """Doubling pauses between calls that fail."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._num_failures = 0

    def next_s(self, error: Unavailable | Rejected) -> float:
        if not self._num_failures:
            _log.warning("home.away", extra={"what": self._what, "error": str(error)[:500]})
        self._num_failures += 1 if isinstance(error, Unavailable) else _REFUSED_COUNTS
        pause_s = backoff_s(
            self._num_failures, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S, spread=random.random()
        )
        return max(pause_s, error.after_s) if isinstance(error, Unavailable) else pause_s

    def end(self) -> bool:
        """End the pauses, because a call has succeeded. Return True if calls had failed before it."""
        was_away, self._num_failures = self._num_failures > 0, 0
        if was_away:
            _log.info("home.back", extra={"what": self._what})
        return was_away


class HomeLink(Protocol):
    """The requests of a supervisor to the service, each on its own thread. They raise Unavailable, Rejected and
    Superseded."""

    def report(self, report: HomeReport) -> ReportReceipt:
        """Send a report, and return what is stored by then. It can be repeated."""

    def directive(self, after: int, wait_s: float) -> DirectiveAnswer:
        """Wait until there is a directive with another number than `after`, or for `wait_s` seconds."""

    def retry_now(self) -> None:
        """Let a `directive` that waits raise Unavailable, so that it is tried again. From any thread."""


class HttpLink:
    """Sends the requests by HTTP, with one kept-alive connection for the reports and one for the directives."""

    def __init__(self, home: Home, job_id: str, attempt: int) -> None:
        path = f"/v1/jobs/{job_id}/attempts/{attempt}"
        self._reports = _Connection(home, f"{path}/reports")
        self._directives = _Connection(home, f"{path}/directive")

    def report(self, report: HomeReport) -> ReportReceipt:
        # JSON has no NaN, so losses that are not finite are written as constants
        body = to_json(report.model_dump(), inf_nan_mode="constants", serialize_unknown=True)
        return ReportReceipt.model_validate(self._reports.ask("POST", "", body, _ANSWER_S), extra="ignore")

    def directive(self, after: int, wait_s: float) -> DirectiveAnswer:
        query = f"?after={after}&wait_s={wait_s:g}"
        answer = self._directives.ask("GET", query, None, wait_s + _ANSWER_S)
        return DirectiveAnswer.model_validate(answer, extra="ignore")

    def retry_now(self) -> None:
        self._directives.interrupt()


class _Connection:
    """A kept-alive connection of one thread; only `interrupt` is for any thread."""

    def __init__(self, home: Home, path: str) -> None:
        self._urls = [urlsplit(url.strip()) for url in home.url.split(",") if url.strip()]
        self._path = path
        self._headers = {
            "Authorization": f"Bearer {home.token}",
            "Content-Type": "application/json",
            "User-Agent": f"shoal-supervisor/{VERSION}",
        }
        self._context = (
            make_context(home.ca, is_pinned=home.is_pinned)
            if any(url.scheme == "https" for url in self._urls)
            else None
        )
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()
        """Guards `_connection`."""

    def ask(self, method: str, query: str, body: bytes | None, answer_s: float) -> Any:
        """Send a request, and return the JSON of the answer."""
        connection = self._open()
        try:
            if connection.sock is None:
                connection.timeout = _CONNECT_S
                connection.connect()
            connection.sock.settimeout(answer_s)
            connection.request(method, f"{self._path}{query}", body, self._headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._close()
            self._urls.append(self._urls.pop(0))  # another control plane may answer
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        if response.will_close:
            self._close()
        if response.status == 200:
            try:
                return json.loads(raw)
            except ValueError as error:
                raise Unavailable("the answer is no JSON: another server has this address") from error
        message = f"{response.status} {raw[:500].decode('utf-8', 'replace')}"
        raise make_error(response.status, message, response.headers.get("Retry-After", ""))

    def interrupt(self) -> None:
        with self._lock:
            sock = self._connection.sock if self._connection is not None else None
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _open(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._connection is None:
                url = self._urls[0]
                assert url.hostname is not None
                if url.scheme == "https":
                    self._connection = http.client.HTTPSConnection(url.hostname, url.port, context=self._context)
                else:
                    self._connection = http.client.HTTPConnection(url.hostname, url.port)
            return self._connection

    def _close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
