"""Commands that show what happens now: top, stacks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, Session, UrlOption, command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal_api.client import Client
    from shoal_service.views import ClusterView, JobSummary

_MAX_JOBS = 1000


def top(
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two views.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view; default if it is not a terminal.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Show all jobs that go on, live: state, progress, workers, goodput, incidents. Ctrl-C ends it."""
    with command(url, as_json) as session, session.open_client() as client:
        if once or not session.output.live:
            jobs, cluster = _read(client)
            document = {"jobs": jobs, "cluster": cluster}
            session.output.document(document, lambda: _page(jobs, cluster))
        else:
            _live(session, client, every)


def stacks(
    job: JobArgument,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    native: Annotated[
        bool, typer.Option("--native", help="Also frames of native code; each worker is paused for it.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Show the Python stacks of all ranks now, clustered by equal ones; also of a rank that hangs or is stopped."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.live.stacks_page import stacks_page

        with session.open_client() as client:
            found = client.stacks(session.job_id(client, job), rank=rank, native=native)
        session.output.document(found, lambda: stacks_page(found))


def _live(session: Session, client: Client, every_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    from shoal_api.client import Disconnected, ServerError

    with Live(console=session.output.stdout, screen=True, auto_refresh=False) as live:
        page: RenderableType = Text("")
        while True:
            try:
                page = _page(*_read(client), max_rows=max(1, session.output.stdout.height - 6))
                live.update(page, refresh=True)
            except (Disconnected, ServerError) as error:
                live.update(Text(f"the server does not answer ({error}); trying again ...", "yellow"), refresh=True)
            time.sleep(every_s)  # the refresh rate of the picture


def _read(client: Client) -> tuple[list[JobSummary], ClusterView]:
    from shoal_workers.contract.job import JobState

    going_on = [state for state in JobState if not state.ended]
    return list(client.jobs(state=going_on, limit=_MAX_JOBS)), client.cluster()


def _page(jobs: list[JobSummary], cluster: ClusterView, max_rows: int = _MAX_JOBS) -> RenderableType:
    from shoal_api.cli.render.live.top_page import top_page

    return top_page(jobs, cluster, time.time(), max_rows)
