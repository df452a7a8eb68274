"""Commands that show what happens now: top, stacks, profile-job, profiles."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, Session, UrlOption, command
from shoal_service.core.quantities import count_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal_api.client import Client
    from shoal_service.fleet_views import ClusterView
    from shoal_service.views import JobSummary, ProfileView

_MAX_JOBS = 1000
_LOOK_S = 0.5
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Directory: trace and memory timeline are written into it.")
]


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
        from shoal_api.cli.render.accounts import stacks_page

        with session.open_client() as client:
            found = client.stacks(session.job_id(client, job), rank=rank, native=native)
        session.output.document(found, lambda: stacks_page(found))


def profile_job(
    job: JobArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, max=20, help="Steps to profile.")] = 3,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank to profile.")] = 0,
    out: OutOption = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Profile some steps of one rank of a running job, without stopping it: a table of where a step's time goes, a
    trace in Chrome's format, and a timeline of memory.

    Waits until the profile has ended. Ctrl-C ends the waiting only; `shoal profiles` shows it later.
    """
    with command(url, as_json) as session:
        with session.open_client() as client:
            job_id = session.job_id(client, job)
            view = client.request_profile(job_id, steps=steps, rank=rank)
            session.output.say(
                f"profile {view.number}: rank {rank} from its next step boundary, {count_text(steps, 'step')}"
            )
            while view.state == "requested":
                time.sleep(_LOOK_S)  # between two questions
                view = client.profile(job_id, view.number)
            _show_profile(session, client, job_id, view, out)


def profiles(
    job: JobArgument,
    number: Annotated[int | None, typer.Argument(metavar="[NUMBER]", min=1, help="Only this profile.")] = None,
    out: OutOption = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """List the profiles of a job, or show one of them and write its files."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_api.cli.render.accounts import profiles_table

        if out is not None and number is None:
            raise CliError("--out needs the number of a profile", hint=f"shoal profiles {job} 1 --out DIR")
        with session.open_client() as client:
            job_id = session.job_id(client, job)
            if number is not None:
                _show_profile(session, client, job_id, client.profile(job_id, number), out)
            else:
                found = client.profiles(job_id)
                session.output.document(found, lambda: profiles_table(found))


def _show_profile(session: Session, client: Client, job_id: str, view: ProfileView, out: Path | None) -> None:
    """Write the files of a profile and return its page. Ends the command with an error if the profile failed."""
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode
    from shoal_api.cli.render.accounts import profile_page

    if view.state == "failed":
        raise CliError(f"profile {view.number} failed: {view.reason}", exit_code=ExitCode.FAILED)
    written = []
    for file in view.files if out is not None else ():
        assert out is not None
        try:
            out.mkdir(parents=True, exist_ok=True)
            with (out / file.name).open("wb") as target:
                client.save_profile_file(job_id, view.number, file.name, target)
        except OSError as error:
            raise CliError(f"{out / file.name} cannot be written: {error.strerror}") from None
        written.append(out / file.name)
    session.output.document(view, lambda: profile_page(view))
    for path in written:
        session.output.say(f"{path}: {path.stat().st_size:,} bytes")


def _live(session: Session, client: Client, every_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    from shoal_api.cli.render.fleet import rows_that_fit
    from shoal_api.client import Disconnected, ServerError

    with Live(console=session.output.stdout, screen=True, auto_refresh=False) as live:
        page: RenderableType = Text("")
        while True:
            try:
                console = session.output.stdout
                page = _page(*_read(client), max_rows=rows_that_fit(console.width, console.height))
                live.update(page, refresh=True)
            except (Disconnected, ServerError) as error:
                live.update(Text(f"the server does not answer ({error}); trying again ...", "yellow"), refresh=True)
            time.sleep(every_s)  # the refresh rate of the picture


def _read(client: Client) -> tuple[list[JobSummary], ClusterView]:
    from shoal_workers.contract.job import JobState

    going_on = [state for state in JobState if not state.ended]
    return list(client.jobs(state=going_on, limit=_MAX_JOBS)), client.cluster()


def _page(jobs: list[JobSummary], cluster: ClusterView, max_rows: int = _MAX_JOBS) -> RenderableType:
    from shoal_api.cli.render.fleet import top_page

    return top_page(jobs, cluster, time.time(), max_rows)
