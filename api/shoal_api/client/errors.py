"""The errors that the client raises, and how they are made from a response.

ClientError
|-- Disconnected            the service cannot be reached, after retries
|-- WaitTimeout             `wait` reached its timeout; has the last known state of the job
|-- UntrustedServer         the port is another user's, so the owner's token was not sent there
`-- ApiError                the service returned a problem document
    |-- BadRequest              400, 413, 415, 421, 422
    |   |-- InvalidSpec         `problem.errors` lists everything that is wrong
    |   |-- Unauthenticated     401: no token, or one that is not valid
    |   `-- Forbidden           403: the token may not do this
    |-- NotFound                404
    |-- Conflict                409
    |-- PreconditionFailed      412
    |-- TooManyRequests         429, after retries; `retry_after_s` says when to come back
    `-- ServerError             5xx
"""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from shoal_api.answers import Problem
from shoal_service.views import JobView
from shoal_workers.contract.base import FieldError


class ClientError(FieldError):
    """Root of the errors that the client defines."""


@dataclass(eq=False)
class Disconnected(ClientError, text="The service at {url} cannot be reached ({cause}). `shoal serve` starts one."):
    url: str
    cause: str


@dataclass(eq=False)
class WaitTimeout(ClientError, text="Job {job.id} is still {job.status.state} after {timeout_s:g} s."):
    job: JobView
    timeout_s: float


@dataclass(eq=False)
class UntrustedServer(
    ClientError,
    text=(
        "The program at {url} belongs to the user with the id {uid}, so the token in {path} was not sent to it. "
        "Set SHOAL_TOKEN, or log in with `shoal login`, if that server is yours."
    ),
):
    url: str
    uid: int
    path: str


class ApiError(ClientError):
    """`problem` is the whole document; programs compare `code`, which is stable."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    @property
    def code(self) -> str:
        return self.problem.code

    def __str__(self) -> str:
        lines = [f"{self.problem.title}: {self.problem.detail}"]
        lines += [
            f"  {fault.path}: {fault.message}" if fault.path else f"  {fault.message}" for fault in self.problem.errors
        ]
        return "\n".join(lines)


class BadRequest(ApiError):
    """400, 413, 415, 421 or 422: the request is not valid."""


class InvalidSpec(BadRequest):
    """The spec is not valid; `problem.errors` lists everything that is wrong."""


class Unauthenticated(BadRequest):
    """401: no token, or one that is not valid."""


class Forbidden(BadRequest):
    """403: the token may not do this."""


class NotFound(ApiError):
    """404: there is no such resource."""


class Conflict(ApiError):
    """409: the state of the resource does not allow it."""


class PreconditionFailed(ApiError):
    """412: the resource was changed in the meantime."""


class TooManyRequests(ApiError):
    """429: the service limits requests. Send the next one after `retry_after_s` seconds."""

    def __init__(self, problem: Problem, retry_after_s: float = 1.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class ServerError(ApiError):
    """5xx: the service failed, or is not ready."""


_BY_STATUS: dict[int, type[ApiError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    412: PreconditionFailed,
}


def parse_error(response: httpx.Response) -> ApiError:
    """Return the exception for a response with status 400 or above, whose body has been read."""
    problem = _parse_problem(response)
    if problem.code == "invalid-spec":
        return InvalidSpec(problem)
    if problem.status >= 500:
        return ServerError(problem)
    if problem.status == 429:
        return TooManyRequests(problem, parse_retry_after_s(response))
    return _BY_STATUS.get(problem.status, BadRequest)(problem)


def parse_retry_after_s(response: httpx.Response) -> float:
    """Return the header Retry-After in seconds; one second if it cannot be read."""
    text = response.headers.get("Retry-After", "")
    return min(60.0, float(text)) if text.isascii() and text.isdigit() else 1.0


def _parse_problem(response: httpx.Response) -> Problem:
    try:
        return Problem.model_validate_json(response.content)
    except ValueError:  # the response comes from a proxy or from the HTTP server itself
        return Problem(
            type="about:blank",
            title=response.reason_phrase or "HTTP error",
            status=response.status_code,
            detail=f"The response is not a problem document: {response.text[:200]!r}",
            instance=response.url.path,
            code=f"http-{response.status_code}",
        )
