"""`extend` and `retry`: a job goes on in place."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, UrlOption, command


def extend(
    job: JobArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that it is to complete in all.")],
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Let a job go on to more steps, in place. A running one follows at its next step boundary; an ended one returns to
    the queue and goes on from its newest checkpoint."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            view = client.extend(session.job_id(client, job), steps)
        session.output.document(
            view, lambda: f"{view.id}  {view.name}  {view.status.state}  step {view.status.step} of {steps}"
        )


def retry(job: JobArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Let a failed job try again, in place, from its newest checkpoint."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            view = client.retry(session.job_id(client, job))
        session.output.document(
            view, lambda: f"{view.id}  {view.name}  {view.status.state}  goes on after step {view.status.step}"
        )
