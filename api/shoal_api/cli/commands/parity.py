"""`shoal parity`: compares the losses of two jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, UrlOption, command

_NUM_POINTS = 200


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
        from shoal_api.cli.render.parity_page import parity_page

        with session.open_client() as client:
            ids = [session.job_id(client, name) for name in (job, against)]
            report = client.parity(*ids, tolerance=tolerance, max_points=0 if as_json else _NUM_POINTS)
            series = [] if as_json else [client.series(job_id, max_points=_NUM_POINTS) for job_id in ids]
        session.output.document(report, lambda: parity_page(report, series))
        if not report.within_tolerance:
            raise typer.Exit(ExitCode.FAILED)
