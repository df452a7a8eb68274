"""The command that gives a running job new code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, UrlOption, command


def update(
    job: JobArgument,
    code: Annotated[
        Path, typer.Option("--code", metavar="DIR", exists=True, file_okay=False, help="Directory with the new code.")
    ],
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Give a job new code while it trains. It takes over at a step boundary, and no step is lost.

    If it raises, is not finite, is slower or builds another model, the job trains on with the code before.
    """
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_service.control.code_archive import CodeArchiveError

        with session.open_client() as client:
            try:
                view = client.update_code(session.job_id(client, job), code)
            except CodeArchiveError as error:
                raise CliError(f"--code {code} cannot be packed: {error}") from None
        version = (view.spec.code.archive or "")[:12]
        session.output.document(
            view,
            lambda: (
                f"{view.id}  {view.name}  {view.status.state}  code {version}\n"
                f"`shoal watch {view.id}` shows when it trains, or why it does not"
            ),
        )
