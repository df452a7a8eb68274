"""Commands about what a job has done and what failures have cost: incidents, goodput, parity; its series, as a file or
on standard output.
"""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, UrlOption, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal_service.views import IncidentView

_NUM_POINTS = 200


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
        from shoal_api.cli.render.accounts import incident_page, incidents_table

        with session.open_client() as client:
            found = client.incidents(session.job_id(client, job))
        if incident is None:
            session.output.document(found, lambda: incidents_table(found))
        else:
            one = _one(found, incident)
            session.output.document(one, lambda: incident_page(one))


def goodput(job: JobArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Show which share of the workers' time was productive, and how the rest was spent."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.accounts import goodput_page
        from shoal_service.core.goodput import Goodput

        with session.open_client() as client:
            view = client.job(session.job_id(client, job))
        session.output.document(view.status.goodput or Goodput(), lambda: goodput_page(view, time.time()))


def parity(
    job: JobArgument,
    against: Annotated[
        str, typer.Option("--against", metavar="JOB2", help="The job to compare with, usually an undisturbed run.")
    ],
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, max=1.0, help="Largest allowed relative difference.")
    ] = 1e-5,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Compare the losses of two jobs step by step. Exit code 1 if they differ by more than the tolerance."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.accounts import parity_page

        with session.open_client() as client:
            ids = [session.job_id(client, name) for name in (job, against)]
            report = client.parity(*ids, tolerance=tolerance, max_points=0 if as_json else _NUM_POINTS)
            series = [] if as_json else [client.series(job_id, max_points=_NUM_POINTS) for job_id in ids]
        session.output.document(report, lambda: parity_page(report, series))
        if not report.within_tolerance:
            raise typer.Exit(ExitCode.FAILED)


def _one(incidents: Sequence[IncidentView], name: str) -> IncidentView:
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.render.accounts import find, name_of

    fitting = find(incidents, name)
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(name_of(one) for one in fitting or incidents)
    if fitting:
        raise CliError(f"several attempts have an incident {name}", hint=f"one of {names}")
    hint = f"the job has {names}" if names else "the job has no incidents"
    raise CliError(f"no incident {name!r}", hint=hint, exit_code=ExitCode.NOT_FOUND)


class Format(StrEnum):
    """Format of the file."""

    CSV = "csv"
    PARQUET = "parquet"


def series(
    job: JobArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File. Default: standard output.")] = None,
    format: Annotated[
        Format | None, typer.Option("--format", help="Default: parquet if the file is named so, else csv.")
    ] = None,
    max_points: Annotated[
        int | None, typer.Option("--max-points", min=1, max=20_000, help="Means if there are more steps than this.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Write loss, speed, world size and the task's own metrics of every step. With --json: a list of points."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError

        chosen = format or (Format.PARQUET if out is not None and out.suffix == ".parquet" else Format.CSV)
        if as_json and (out is not None or format is not None):
            raise CliError("--json prints the points", hint="leave out --json to write a file")
        if out is None and chosen is Format.PARQUET:
            raise CliError("parquet is not text", hint="name a file with -o FILE")
        with session.open_client() as client:
            job_id = session.job_id(client, job)
            if as_json:
                session.output.document(client.series(job_id, max_points=max_points or 20_000), str)
            elif out is None:
                client.save_series(job_id, sys.stdout.buffer, format=chosen, max_points=max_points)
            else:
                part = out.with_name(f"{out.name}.part")
                try:
                    with part.open("wb") as file:
                        client.save_series(job_id, file, format=chosen, max_points=max_points)
                    part.replace(out)
                except OSError as error:
                    raise CliError(f"{out} cannot be written: {error.strerror}") from None
                finally:
                    part.unlink(missing_ok=True)
                session.output.say(f"{out}: {out.stat().st_size:,} bytes")
