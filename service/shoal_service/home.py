"""What a supervisor and the service say to each other: the supervisor dials the REST edge, and is not dialled.

    POST /v1/jobs/{id}/attempts/{n}/reports     HomeReport -> ReportReceipt
    GET  /v1/jobs/{id}/attempts/{n}/directive   long poll -> DirectiveAnswer

Pure data, in JSON. Either side leaves out fields that it does not know, since the releases of two control planes on
one database, and that of a supervisor, may differ for a while. Decision 0005.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from shoal_service.reports import SupervisorReports
from shoal_workers.contract import Frozen

MAX_WAIT_S = 30.0
"""How long a poll may wait, for directives or for orders."""


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
