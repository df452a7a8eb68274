"""Commands about what a job has done and what failures have cost: incidents, goodput, parity; its series, as a file or
on standard output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.options import JobArgument
from shoal_api.cli.output import complete_file
from shoal_api.cli.render.accounts import find, goodput_page, incident_name, incident_page, incidents_table, parity_page
from shoal_api.cli.session import Session, command
from shoal_service.core.goodput import Goodput
from shoal_service.views import IncidentView

_NUM_POINTS = 200


@command()
def incidents(
    session: Session,
    job: JobArgument,
    incident: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="Show one incident; an id or attempt.id.",
        ),
    ] = None,
) -> None:
    """List the failures of a job and what each one cost. With ID: one incident and the duration of its phases."""
    incidents = session.client.incidents(session.job_id(job))
    if incident is None:
        session.show(incidents, incidents_table)
    else:
        session.show(_find_incident(incidents, incident), incident_page)


@command()
def goodput(session: Session, job: JobArgument) -> None:
    """Show which share of the workers' time was productive, and how the rest was spent."""
    view = session.client.job(session.job_id(job))
    session.show(view.status.goodput or Goodput(), goodput_page(view, time.time()))


@command()
def parity(
    session: Session,
    job: JobArgument,
    against: Annotated[
        str, typer.Option("--against", metavar="JOB2", help="The job to compare with, usually an undisturbed run.")
    ],
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, max=1.0, help="Largest allowed relative difference.")
    ] = 1e-5,
) -> None:
    """Compare the losses of two jobs step by step. Exit code 1 if they differ by more than the tolerance."""
    ids = [session.job_id(name) for name in (job, against)]
    as_json = session.output.as_json
    report = session.client.parity(*ids, tolerance=tolerance, max_points=0 if as_json else _NUM_POINTS)
    series = [] if as_json else [session.client.series(job_id, max_points=_NUM_POINTS) for job_id in ids]
    session.show(report, lambda report: parity_page(report, series))
    if not report.within_tolerance:
        raise typer.Exit(ExitCode.FAILED)


def _find_incident(incidents: Sequence[IncidentView], name: str) -> IncidentView:
    matches = find(incidents, name)
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(incident_name(incident) for incident in matches or incidents)
    if matches:
        raise CliError(f"several attempts have an incident {name}", hint=f"one of {names}")
    hint = f"the job has {names}" if names else "the job has no incidents"
    raise CliError(f"no incident {name!r}", hint=hint, exit_code=ExitCode.NOT_FOUND)


class Format(StrEnum):
    """Format of the file."""

    CSV = "csv"
    PARQUET = "parquet"


@command()
def series(
    session: Session,
    job: JobArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File. Default: standard output.")] = None,
    format: Annotated[
        Format | None, typer.Option("--format", help="Default: parquet if the file is named so, else csv.")
    ] = None,
    max_points: Annotated[
        int | None, typer.Option("--max-points", min=1, max=20_000, help="Means if there are more steps than this.")
    ] = None,
) -> None:
    """Write loss, speed, world size and the task's own metrics of every step. With --json: a list of points."""
    if session.output.as_json and (out is not None or format is not None):
        raise CliError("--json prints the points", hint="leave out --json to write a file")
    format = format or (Format.PARQUET if out is not None and out.suffix == ".parquet" else Format.CSV)
    if out is None and format is Format.PARQUET:
        raise CliError("parquet is not text", hint="name a file with -o FILE")
    job_id = session.job_id(job)
    if session.output.as_json:
        session.show(session.client.series(job_id, max_points=max_points or 20_000), str)
    elif out is None:
        session.client.save_series(job_id, sys.stdout.buffer, format=format, max_points=max_points)
    else:
        with complete_file(out) as file:
            session.client.save_series(job_id, file, format=format, max_points=max_points)
        session.output.say(f"{out}: {out.stat().st_size:,} bytes")
