"""The spec that a principal submits: its project must be one of the principal's, and its user is the principal's. Pure.

The limits of users and the shares of projects would mean nothing if a spec could name another's.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_api.http.problems import Forbidden
from shoal_service.core.access import Principal, Role
from shoal_workers.contract import JobSpec


@dataclass(frozen=True, slots=True)
class OwnedSpec:
    spec: JobSpec
    note: str
    """What was changed, for the note of the job's status."""


def of_principal(spec: JobSpec, principal: Principal) -> OwnedSpec:
    """Return the spec with the principal's user; and its project, if the spec names none and the principal has only
    one.

    Raises:
        Forbidden: if the principal may not submit jobs of this project, may not have the server read a
            directory of its own machine, or may not set a webhook for mail and chat.
    """
    changes, notes = {}, []
    if not principal.sees(spec.project):
        assert principal.projects is not None
        if "project" in spec.model_fields_set or len(principal.projects) != 1:
            shown = ", ".join(sorted(principal.projects))
            raise Forbidden(f"{principal.name} may submit jobs of {shown}, not of the project {spec.project!r}.")
        changes["project"] = next(iter(principal.projects))
    if spec.code.archive is None:
        require_no_directory_of_server(spec.code.working_dir, principal)
    if principal.role is not Role.ADMIN and any(hook.is_apprise for hook in spec.webhooks):
        raise Forbidden(
            "a webhook has the url 'apprise:', which only an admin may set: its secret decides which programs and "
            "hosts are called. Use an https:// receiver, or ask an admin for one in SHOAL_WEBHOOKS.",
        )
    if principal.user and spec.user != principal.user:
        changes["user"] = principal.user
        if "user" in spec.model_fields_set:
            notes.append(f"user is {principal.user}, that of the token, not {spec.user}.")
    return OwnedSpec(spec.model_copy(update=changes) if changes else spec, " ".join(notes))


def require_no_directory_of_server(working_dir: str | None, principal: Principal) -> None:
    """Only an admin may submit `code` without an archive: it names a directory of the server. Raises
    Forbidden."""
    if working_dir is not None and principal.role is not Role.ADMIN:
        raise Forbidden(
            f"code.working_dir {working_dir!r} without code.archive is a directory of the server, which only "
            "an admin may name. The command line and the Python client upload yours: PUT /v1/code/{sha256}.",
        )
