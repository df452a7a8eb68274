"""`shoal series`: the series of a job, as a file or on standard output."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, UrlOption, command


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
