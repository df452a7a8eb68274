"""Answers of the REST API that are not resources of the service: pages of histories, checks, problems. Pure data.

The HTTP edge writes them and the Python client reads them; this module imports neither.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from shoal_service.views import EventView, LogView
from shoal_workers.contract import Frozen, JobSpec, JobState
from shoal_workers.contract.checks.spec_errors import SpecProblem


class EventPage(Frozen):
    """Part of a job's history, oldest first, without gaps."""

    items: tuple[EventView, ...]
    next_after: int
    """Pass it as `after` to go on: the number of the last event here, or, without any, the `after` of the request."""
    ended: bool
    """The job has ended and `items` reaches the end of its history: nothing follows."""


class LogPage(Frozen):
    """Part of a job's log, oldest first."""

    items: tuple[LogView, ...]
    next_after: int
    """Pass it as `after` to go on."""


def find_log_source(line: LogView) -> str:
    """The writer of a line: a rank, `job` for the job's own log, `-` for a worker without a rank."""
    if not line.worker_id:
        return "job"
    return "-" if line.rank is None else str(line.rank)


class FileFormat(StrEnum):
    """The format of a file."""

    CSV = "csv"
    PARQUET = "parquet"


class SpecCheck(Frozen):
    """The result of `POST /v1/specs/validate`."""

    valid: bool
    errors: tuple[SpecProblem, ...] = ()
    spec: JobSpec | None = None
    """The spec with all defaults; null: it is not valid."""


class CodeStored(Frozen):
    """A code archive that a spec may name as `code.archive`."""

    sha256: str
    bytes: int


class Health(Frozen):
    """The process answers."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(Frozen):
    """The service can accept and run jobs."""

    ready: Literal[True] = True
    store: str
    cluster: str
    """Address of the Ray cluster."""
    programs: str = (
        "`shoal submit train.py --workers 2` runs a program on this cluster. RAY_ADDRESS does not: the cluster accepts "
        "connections with its own token only."
    )
    """For people who look for the cluster's address here: how a program gets onto it."""
    owner: str
    """The control plane that holds the lease; empty: none does."""
    epoch: int
    """The lease's fencing token."""
    warnings: tuple[str, ...] = ()
    """Problems that do not stop jobs, such as a node of the embedded cluster that is away."""


class Problem(Frozen):
    """An error, in the form of RFC 9457."""

    type: str
    """A stable relative URI, for example /problems/job-not-found. Programs may compare it."""
    title: str
    """The same for every problem of this `type`."""
    status: int
    """The HTTP status."""
    detail: str
    """What happened, and what to do about it."""
    instance: str
    """The path of the request."""
    code: str
    """The last part of `type`."""
    errors: tuple[SpecProblem, ...] = ()
    """Every error in a document that was refused."""
    error_id: str | None = None
    """Id under which the service's log holds the cause, for status 500."""


class ProblemType(Frozen):
    """One entry of the list of problem types."""

    type: str
    title: str
    status: int
    meaning: str = Field(max_length=1000)


class StreamEnd(Frozen):
    """Data of the `end` event, the last one of a stream: the job has ended and everything has been sent."""

    state: JobState
