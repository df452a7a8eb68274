"""Commands that show what happens now: top, stacks, profile-job, profiles."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.options import JobArgument
from shoal_api.cli.output import complete_file
from shoal_api.cli.render.accounts import profile_page, profiles_table, stacks_page
from shoal_api.cli.render.fleet import rows_that_fit, top_page
from shoal_api.cli.session import Session, command
from shoal_api.client import Disconnected, ServerError
from shoal_service.core.quantities import count_text
from shoal_service.fleet_views import ClusterView
from shoal_service.views import JobSummary, ProfileView
from shoal_workers.contract.job import JobState

_MAX_JOBS = 1000
_POLL_S = 0.5
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Directory: trace and memory timeline are written into it.")
]


@command()
def top(
    session: Session,
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two views.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view; default if it is not a terminal.")] = False,
) -> None:
    """Show all jobs that go on, live: state, progress, workers, goodput, incidents. Ctrl-C ends it."""
    if once or not session.output.live:
        jobs, cluster = _read(session)
        session.show({"jobs": jobs, "cluster": cluster}, top_page(jobs, cluster, time.time(), _MAX_JOBS))
    else:
        _show_live(session, every)


@command()
def stacks(
    session: Session,
    job: JobArgument,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    native: Annotated[
        bool, typer.Option("--native", help="Also frames of native code; each worker is paused for it.")
    ] = False,
) -> None:
    """Show the Python stacks of all ranks now, clustered by equal ones; also of a rank that hangs or is stopped."""
    session.show(session.client.stacks(session.job_id(job), rank=rank, native=native), stacks_page)


@command()
def profile_job(
    session: Session,
    job: JobArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, max=20, help="Steps to profile.")] = 3,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank to profile.")] = 0,
    out: OutOption = None,
) -> None:
    """Profile some steps of one rank of a running job, without stopping it: a table of where a step's time goes, a
    trace in Chrome's format, and a timeline of memory.

    Waits until the profile has ended. Ctrl-C ends the waiting only; `shoal profiles` shows it later.
    """
    job_id = session.job_id(job)
    view = session.client.request_profile(job_id, steps=steps, rank=rank)
    session.output.say(f"profile {view.number}: rank {rank} from its next step boundary, {count_text(steps, 'step')}")
    while view.state == "requested":
        time.sleep(_POLL_S)
        view = session.client.profile(job_id, view.number)
    _show_profile(session, job_id, view, out)


@command()
def profiles(
    session: Session,
    job: JobArgument,
    number: Annotated[int | None, typer.Argument(metavar="[NUMBER]", min=1, help="Only this profile.")] = None,
    out: OutOption = None,
) -> None:
    """List the profiles of a job, or show one of them and write its files."""
    if out is not None and number is None:
        raise CliError("--out needs the number of a profile", hint=f"shoal profiles {job} 1 --out DIR")
    job_id = session.job_id(job)
    if number is not None:
        _show_profile(session, job_id, session.client.profile(job_id, number), out)
    else:
        session.show(session.client.profiles(job_id), profiles_table)


def _show_profile(session: Session, job_id: str, view: ProfileView, out: Path | None) -> None:
    """Write the files of a profile, and show its page. Raises CliError if the profile failed."""
    if view.state == "failed":
        raise CliError(f"profile {view.number} failed: {view.reason}", exit_code=ExitCode.FAILED)
    paths = {file.name: out / file.name for file in view.files} if out is not None else {}
    for name, path in paths.items():
        with complete_file(path, parents=True) as file:
            session.client.save_profile_file(job_id, view.number, name, file)
    session.show(view, profile_page)
    for path in paths.values():
        session.output.say(f"{path}: {path.stat().st_size:,} bytes")


def _show_live(session: Session, every_s: float) -> None:
    with Live(console=session.output.stdout, screen=True, auto_refresh=False) as live:
        while True:
            try:
                console = session.output.stdout
                page = top_page(*_read(session), time.time(), rows_that_fit(console.width, console.height))
                live.update(page, refresh=True)
            except (Disconnected, ServerError) as error:
                live.update(Text(f"the server does not answer ({error}); trying again ...", "yellow"), refresh=True)
            time.sleep(every_s)  # the refresh rate of the picture


def _read(session: Session) -> tuple[list[JobSummary], ClusterView]:
    active = [state for state in JobState if not state.ended]
    return list(session.client.jobs(state=active, limit=_MAX_JOBS)), session.client.cluster()
