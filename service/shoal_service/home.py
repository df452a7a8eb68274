"""What a supervisor and the service say to each other: the supervisor dials the REST edge, and is not dialled.

    POST /v1/jobs/{id}/attempts/{n}/reports     HomeReport -> ReportReceipt
    GET  /v1/jobs/{id}/attempts/{n}/directive   long poll -> DirectiveAnswer

Pure data, in JSON. Either side leaves out fields that it does not know, since the releases of two control planes on
one database, and that of a supervisor, may differ for a while. Decision 0005.

How a request fails, for supervisors and gateways, which both dial in:

DialError
|-- Unavailable     no answer, or not now: try again later
|-- Superseded      another process speaks for the attempt or the cluster: this one has to end, or to stand by
`-- Rejected        the service does not accept the token or the document; it may later, if nothing else helps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from shoal_service.reports import SupervisorReports
from shoal_workers.contract import Frozen

MAX_WAIT_S = 30.0
"""How long a poll may wait, for directives or for orders."""
_SUPERSEDED = 409
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_PAUSE_S = 30.0


class Home(Frozen):
    """Where a supervisor reports, and as whom."""

    url: str = ""
    """Address of the service: http(s)://host:port. Several, separated by commas, are those of control planes on one
    database; the supervisor uses the first that answers. Empty: whoever starts the supervisor fills it in."""
    token: str = ""
    """Token of the attempt. A supervisor may report for the attempt and read its directives with it, and nothing
    else."""
    ca: str = ""
    """Certificates in PEM that the service's certificate is checked with; empty: those of the operating system."""
    is_pinned: bool = False
    """`ca` is the certificate of the service itself, whatever name it has."""


@dataclass(frozen=True, slots=True)
class AttemptCaller:
    """Who dials: the supervisor that has shown the token of an attempt."""

    job_id: str
    attempt: int
    token_hash: str


class HomeReport(Frozen):
    """What a supervisor sends: at once when there is something new, and at least every second as a sign of life."""

    life: Annotated[int, Field(ge=0)]
    """Life of the supervisor: greater than that of every one before it. A lower one than the service knows is
    refused."""
    after: Annotated[int, Field(ge=0)]
    """Number of the last item that the service has acknowledged, as the supervisor knows."""
    reports: SupervisorReports | None = None
    """All that is numbered higher. None only asks what is acknowledged."""


class ReportReceipt(Frozen):
    """The items up to a number are stored."""

    acknowledged: int
    """The supervisor drops them, and goes on from there."""
    released: bool = False
    """The end of the attempt is stored: the journal is not needed any more."""


class DirectiveAnswer(Frozen):
    """The newest directive, if its number is not the one that the supervisor has named."""

    number: int
    """Rises with each directive of the attempt; 0: there is none yet."""
    directive: dict[str, Any] | None = None
    """A Directive, as the control plane with the lease has written it. None means nothing new."""


class DialError(Exception):
    """The service has not answered as it should. The message is the service's, if it has answered."""


class Unavailable(DialError):
    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason, after_s)
        self.reason = reason
        self.after_s = after_s
        """The pause that the service has asked for, seconds; 0 if it has asked for none."""

    def __str__(self) -> str:
        return self.reason


class Superseded(DialError):
    """Another process speaks for the attempt or the cluster."""


class Rejected(DialError):
    """The service refuses the request, also when it is repeated."""


def error_of_answer(status: int, message: str, retry_after: str) -> DialError:
    """Return what an answer means that is no success. `retry_after`: its header, empty if there is none."""
    if status == _SUPERSEDED:
        return Superseded(message)
    return Unavailable(message, _pause_s(retry_after)) if status in _LATER else Rejected(message)


def _pause_s(retry_after: str) -> float:
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(retry_after)))
    except ValueError:
        return 0.0  # none, or a date
