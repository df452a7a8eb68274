"""`shoal incidents`: the failures of a job and what each one cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, UrlOption, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal_service.views import IncidentView


def incidents(
    job: JobArgument,
    incident: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="Show one incident; an id or attempt.id.",
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """List the failures of a job and what each one cost. With ID: one incident and the duration of its phases."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.incident_page import incident_page, incidents_table

        with session.open_client() as client:
            found = client.incidents(session.job_id(client, job))
        if incident is None:
            session.output.document(found, lambda: incidents_table(found))
        else:
            one = _one(found, incident)
            session.output.document(one, lambda: incident_page(one))


def _one(incidents: Sequence[IncidentView], name: str) -> IncidentView:
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode
    from shoal_api.cli.render.incident_page import find, name_of

    fitting = find(incidents, name)
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(name_of(one) for one in fitting or incidents)
    if fitting:
        raise CliError(f"several attempts have an incident {name}", hint=f"one of {names}")
    hint = f"the job has {names}" if names else "the job has no incidents"
    raise CliError(f"no incident {name!r}", hint=hint, exit_code=ExitCode.NOT_FOUND)
