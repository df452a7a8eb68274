"""The errors that a client is told of. The class of an error is the only place that has its code, HTTP status, title
and meaning.

    @dataclass(eq=False)
    class JobNotFound(NotFound, code="job-not-found", status=404, title="No such job", text="There is no {job_id}."):
        \"\"\"No job has this id.\"\"\"

        job_id: str

The meaning is the docstring. The API answers a `ServiceError` with a problem document (RFC 9457), whose detail is the
text of the error. `/problems` and the OpenAPI document list the kinds of all subclasses. Any other exception is
answered with 500.

`SettingsError` is for who starts a process of the service, and is no answer of the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal_workers.contract.base import FieldError
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


class ServiceError(FieldError):
    """An error that a client is told of.

    A class without fields takes the text for the client. One with fields is a dataclass, and `text` or `__str__` makes
    its text of them. A class without a code has the kind of its base.
    """

    kind: ClassVar[ProblemKind]
    errors: tuple[SpecProblem, ...] = ()
    """What is wrong with the parts of a document."""
    headers: Mapping[str, str] | None = None
    """More headers of the answer."""

    def __init_subclass__(cls, *, code: str = "", status: int = 0, title: str = "", **others: Any) -> None:
        super().__init_subclass__(**others)
        if code:
            cls.kind = ProblemKind(code, status, title, " ".join((cls.__doc__ or "").split()))

    def __init__(
        self, detail: str, errors: tuple[SpecProblem, ...] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.errors = errors
        self.headers = headers


class Unauthenticated(ServiceError, code="unauthenticated", status=401, title="No valid token"):
    """The request shows no token, or one that is unknown, expired or revoked. The detail names the way out."""


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
