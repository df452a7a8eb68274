"""The errors that a client is told of. The class of an error is the only place that has its code, HTTP status, title
and meaning.

    @dataclass(eq=False)
    class JobNotFound(NotFound):
        kind = ProblemKind("job-not-found", 404, "No such job", "No job has this id.")
        job_id: str

        def __str__(self) -> str: ...

The API answers a `ServiceError` with a problem document (RFC 9457), whose detail is the text of the error. `/problems`
and the OpenAPI document list the kinds of all subclasses. Any other exception is answered with 500.

`SettingsError` is for who starts a process of the service, and is no answer of the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shoal_workers.contract.checks.spec_errors import SpecProblem


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """A type of problem. It is part of the API."""

    code: str
    status: int
    title: str
    meaning: str

    @property
    def uri(self) -> str:
        return f"/problems/{self.code}"


class ServiceError(Exception):
    """An error that a client is told of.

    A class without fields takes the text for the client. One with fields is a dataclass and makes its text of them. A
    class without `kind` has that of its base.
    """

    kind: ClassVar[ProblemKind]
    errors: tuple[SpecProblem, ...] = ()
    """What is wrong with the parts of a document."""
    headers: Mapping[str, str] | None = None
    """More headers of the answer."""

    def __init__(
        self, detail: str, errors: tuple[SpecProblem, ...] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.errors = errors
        self.headers = headers

    def __post_init__(self) -> None:
        """Complete a dataclass: `args` is what pickling passes to the class."""
        self.args = tuple(vars(self).values())


class Unauthenticated(ServiceError):
    kind = ProblemKind(
        "unauthenticated",
        401,
        "No valid token",
        "The request shows no token, or one that is unknown, expired or revoked. The detail names the way out.",
    )


def problem_kinds(base: type[ServiceError] = ServiceError) -> dict[str, ProblemKind]:
    """Return the kinds of all imported errors by code."""
    kinds: dict[str, ProblemKind] = {}
    for error in base.__subclasses__():
        kinds |= problem_kinds(error)
        if "kind" in vars(error):
            kinds[error.kind.code] = error.kind
    return dict(sorted(kinds.items()))


class SettingsError(ValueError):
    """Settings that cannot work, or do not fit this machine; the message names each one and its value, and what to
    do."""

    code = "invalid_settings"
