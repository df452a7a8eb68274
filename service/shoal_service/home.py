"""Messages between a supervisor and the service: the supervisor calls the REST API, and the service never calls it.

    POST /v1/jobs/{id}/attempts/{n}/reports     HomeReport -> ReportReceipt
    GET  /v1/jobs/{id}/attempts/{n}/directive   long poll -> DirectiveAnswer

Data, in JSON. Each side ignores fields that it does not know, since the releases of two control planes on one
database, and of a supervisor, may differ for a while. Decision 0005.

Errors of a request, for supervisors and gateways:

DialError
|-- Unavailable     no answer, or not now: try again later
|-- Superseded      another process reports for the attempt or the cluster: this one has to end, or to stand by
`-- Rejected        the service refuses the token or the document: try again after the longest pause
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from shoal_service.reports import SupervisorReports
from shoal_workers.contract import Frozen

MAX_WAIT_S = 30.0
"""Longest wait of a poll for directives or for orders."""
_SUPERSEDED_STATUS = 409
_UNAVAILABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_PAUSE_S = 30.0


class Home(Frozen):
    """The service to which a supervisor reports, and the token for it."""

    url: str = ""
    """Address of the service: http(s)://host:port. Several, separated by commas, are those of control planes on one
    database; the supervisor uses the first that answers. If empty, the process that starts the supervisor sets it."""
    token: str = ""
    """Token of the attempt. It permits only to report for the attempt, and to read its directives."""
    ca: str = ""
    """Certificates in PEM that verify the service's certificate; if empty, those of the operating system do."""
    is_pinned: bool = False
    """`ca` is the certificate of the service itself, whatever name it has."""


@dataclass(frozen=True, slots=True)
class AttemptCaller:
    """The supervisor of an attempt, which has sent the attempt's token."""

    job_id: str
    attempt: int
    token_hash: str


class HomeReport(Frozen):
    """Sent after each change, and at least once a second as a sign of life."""

    life: Annotated[int, Field(ge=0)]
    """Incarnation of the supervisor: greater than those before it. The service refuses one below the newest."""
    after: Annotated[int, Field(ge=0)]
    """Number of the last item that the service has acknowledged, as far as the supervisor knows."""
    reports: SupervisorReports | None = None
    """All items with higher numbers. None only asks which are acknowledged."""


class ReportReceipt(Frozen):
    """Acknowledges the items up to a number, which are stored."""

    acknowledged: int
    """Number of the last stored item. The supervisor drops it and those before it."""
    released: bool = False
    """True if the end of the attempt is stored, so the journal is not needed any more."""


class DirectiveAnswer(Frozen):
    """Has the newest directive, unless the request names its number."""

    number: int
    """Rises with each directive of the attempt; 0 if there is none yet."""
    directive: dict[str, Any] | None = None
    """A Directive, as the control plane with the lease has written it; None if there is nothing new."""


class DialError(Exception):
    """A request has failed. The message is that of the service, if it has answered."""


class Unavailable(DialError):
    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason, after_s)
        self.reason = reason
        self.after_s = after_s
        """The pause that the service demands, in seconds; 0 if it demands none."""

    def __str__(self) -> str:
        return self.reason


class Superseded(DialError):
    """Another process reports for the attempt or the cluster."""


class Rejected(DialError):
    """The service refuses the request, also when it is repeated."""


def make_error(status: int, message: str, retry_after: str) -> DialError:
    """Make the error of an answer without success. `retry_after`: its header, empty if it has none."""
    if status == _SUPERSEDED_STATUS:
        return Superseded(message)
    return Unavailable(message, _parse_pause(retry_after)) if status in _UNAVAILABLE_STATUSES else Rejected(message)


def _parse_pause(retry_after: str) -> float:
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(retry_after)))
    except ValueError:
        return 0.0  # none, or a date


def make_context(ca: str, *, is_pinned: bool) -> ssl.SSLContext:
    """Make the TLS context with which the service's certificate is verified; see `Home`."""
    context = ssl.create_default_context(cadata=ca or None)
    if is_pinned:
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted, whoever issued it
    return context
