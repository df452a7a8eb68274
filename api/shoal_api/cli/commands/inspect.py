"""Commands that only read: what jobs are and do, what they have done and what failures have cost, what happens now, and
the cluster and webhooks. One writes a job's series into a file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from shoal_api.answers import FileFormat, find_log_source
from shoal_api.cli.render.accounts import (
    incident_name,
    render_goodput,
    render_incident,
    render_incidents,
    render_parity,
    render_profile,
    render_profiles,
    render_stacks,
)
from shoal_api.cli.render.fleet import render_cluster, render_top, render_webhooks, rows_that_fit
from shoal_api.cli.render.jobs import (
    no_match,
    render_checkpoints,
    render_fields,
    render_job,
    render_jobs,
    render_rounds,
    render_workers,
)
from shoal_api.cli.render.progress import event_text, find_style
from shoal_api.cli.render.terminal import format_time
from shoal_api.cli.session import CliError, ExitCode, JobArgument, Session, command, open_output, refuse_with
from shoal_api.client import Disconnected, JobsQuery, ServerError
from shoal_service.control.spec_io import encode
from shoal_service.core.goodput import Goodput
from shoal_service.core.quantities import count_text
from shoal_service.fleet_views import ClusterView
from shoal_service.views import IncidentView, JobSummary, JobView, ProfileView
from shoal_workers.contract import JobState, LogStream

_DEFAULT_LIMIT = 100
"""Jobs that are listed if no limit is given."""
FollowFlag = Annotated[bool, typer.Option("--follow", "-f", help="Continue with new entries until the job ends.")]


@command()
def jobs(
    session: Session,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="Only jobs in this state, for example RUNNING. May be repeated.")
    ] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only jobs of this project.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="Only jobs of this user.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="NAME[=VALUE]",
            help="Only jobs with this label; also !NAME and NAME!=VALUE. May be repeated.",
        ),
    ] = None,
    search: Annotated[
        str, typer.Option("--search", help="Only jobs with these words in name, id, project, user or labels.")
    ] = "",
    where: Annotated[
        str,
        typer.Option(
            "--where", metavar="CONDITION", help="Only jobs that fit a condition: 'lr > 1e-3 and state == \"FAILED\"'."
        ),
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", metavar="NAMES", help="Order, such as --sort=-loss,created; a dash reverses.")
    ] = "",
    columns: Annotated[
        str, typer.Option("--columns", metavar="NAMES", help="What to show, such as loss,optimizer.lr,label.team.")
    ] = "",
    archived: Annotated[bool, typer.Option("--archived", help="Also archived jobs.")] = False,
    fields: Annotated[
        bool, typer.Option("--fields", help="List the names that --where, --sort and --columns accept, and no jobs.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help='Write them as CSV; "-": to the output.')
    ] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", metavar="FILE", help="Write them as Parquet.")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Largest number of jobs; default 100, in a file all.")
    ] = None,
) -> None:
    """List jobs, newest first. Conditions, orders and columns can use all settings, metrics and labels."""
    query = JobsQuery(
        state=_parse_states(state or []),
        project=project,
        user=user,
        label=label or (),
        search=search,
        where=where,
        sort=sort,
        columns=columns,
        archived=archived,
    )
    if fields:
        refuse_with("--fields", **query, csv=csv, parquet=parquet, limit=limit)
        session.show(session.client.job_fields(), render_fields)
        return
    files = {format: path for format, path in (("csv", csv), ("parquet", parquet)) if path is not None}
    for format, path in files.items():
        _export(session, path, format, query, limit)
    if files:
        return
    names = [name.strip() for name in columns.split(",") if name.strip()]
    matches = list(session.client.jobs(**query, limit=limit or _DEFAULT_LIMIT))
    if matches or session.output.as_json or not any((state, project, user, label, search, where)):
        session.show(matches, lambda jobs: render_jobs(jobs, time.time(), names))
    else:
        num_jobs = session.client.overview_of_all(limit=1).total
        session.show(matches, no_match(num_jobs, where, session.client.job_fields(), time.time()))


def _export(session: Session, path: Path, format: str, query: JobsQuery, limit: int | None) -> None:
    """Write the file, or CSV to the standard output if the path is `-`."""
    if str(path) == "-" and format != "csv":
        raise CliError(
            f"--{format} - would write binary data to the standard output", hint=f"name a file: --{format} FILE"
        )
    with open_output(path) as file:
        num_jobs = session.client.export_jobs(file, format=format, limit=limit, **query)
    if str(path) != "-":
        session.output.say(f"{count_text(num_jobs, 'job')} in {path}")


@command()
def show(
    session: Session,
    job: JobArgument,
    spec: Annotated[
        bool, typer.Option("--spec", help="Its spec as YAML: only what differs from the defaults.")
    ] = False,
) -> None:
    """Show a job: progress, why it waits, why it failed."""
    job_id = session.job_id(job)
    view = session.client.job(job_id)
    if spec:
        session.show(view.spec, lambda spec: encode(spec).rstrip())
        return
    if session.output.as_json:
        session.show(view, str)
        return
    series, several = session.client.series(job_id), len(session.client.clusters()) > 1
    names = session.job_names(view.queue.holders if view.queue is not None else ())
    session.show(view, render_job(view, series, time.time(), several_clusters=several, names=names))


@command()
def logs(
    session: Session,
    job: JobArgument,
    follow: FollowFlag = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only the last N lines.")] = None,
) -> None:
    """Print the log of a job, with time and rank of each line. Lines with [job] say what happens to it; a line marks
    where an attempt begins.

    With --json: one list, or with --follow one line per entry.
    """
    job_id = session.job_id(job)
    lines = session.client.logs(job_id, rank=rank, tail=tail, follow=follow)
    if session.output.as_json and not follow:
        session.show(list(lines), str)
        return
    has_printed = False
    attempt: int | None = None
    for line in lines:
        has_printed = has_printed or line.stream is not LogStream.SHOAL
        if not session.output.as_json and line.attempt and line.attempt != attempt:
            attempt = line.attempt
            session.output.line(line, f"--- attempt {attempt} ---", "bold")
        text = f"{format_time(line.at)} [{find_log_source(line)}] {line.text.rstrip()}"
        session.output.line(line, text, "dim" if line.stream is LogStream.SHOAL else "plain")
    if not has_printed:
        session.output.say(_describe_silence(session.client.job(job_id), rank, tail), "dim")


@command()
def events(session: Session, job: JobArgument, follow: FollowFlag = False) -> None:
    """Print the events of a job. With --json: one list, or with --follow one line per event."""
    job_id = session.job_id(job)
    history = session.client.events(job_id, follow=follow)
    if session.output.as_json and not follow:
        session.show(list(history), str)
        return
    for event in history:
        session.output.line(event, event_text(event), find_style(event))


@command()
def workers(session: Session, job: JobArgument) -> None:
    """List the workers of a job: rank, node, pid, phase."""
    session.show(session.client.workers(session.job_id(job)), render_workers)


@command()
def checkpoints(session: Session, job: JobArgument) -> None:
    """List the checkpoints of a job."""
    session.show(session.client.checkpoints(session.job_id(job)), render_checkpoints)


@command()
def cluster(session: Session) -> None:
    """Show the nodes of the cluster, and what is free."""
    session.show(session.client.cluster(), render_cluster)


@command()
def webhooks(
    session: Session,
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Id or name of a job; without it: all jobs together.")
    ] = None,
) -> None:
    """Show what webhooks have delivered, and which receivers fail."""
    hooks = session.client.webhooks(None if job is None else session.job_id(job))
    session.show(hooks, lambda hooks: render_webhooks(hooks, time.time()))


def _parse_states(names: list[str]) -> list[JobState]:
    states = {state.value: state for state in JobState}
    for name in names:
        if name.upper() not in states:
            raise CliError(f"--state {name!r} is not a state of a job", hint=f"use one of {', '.join(states)}")
    return [states[name.upper()] for name in names]


def _describe_silence(job: JobView, rank: int | None, tail: int | None) -> str:
    """Say why the lines have nothing that the task printed."""
    who = "the task" if rank is None else f"rank {rank}"
    if tail is not None:
        return f"none of the last {tail} lines is from {who}"
    return f"{who} has printed nothing" + ("" if job.status.state.ended else f" so far; the job is {job.status.state}")


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
        session.show(incidents, render_incidents)
    else:
        session.show(_find_incident(incidents, incident), render_incident)


@command()
def rounds(session: Session, job: JobArgument) -> None:
    """List the rounds in which a job merges with other islands, and what each island has sent."""
    session.show(session.client.rounds(session.job_id(job)), render_rounds)


@command()
def goodput(session: Session, job: JobArgument) -> None:
    """Show which share of the workers' time was productive, and how the rest was spent."""
    view = session.client.job(session.job_id(job))
    session.show(view.status.goodput or Goodput(), render_goodput(view, time.time()))


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
    session.show(report, lambda report: render_parity(report, series))
    if not report.within_tolerance:
        raise typer.Exit(ExitCode.FAILED)


def _find_incident(incidents: Sequence[IncidentView], name: str) -> IncidentView:
    """Return the incident that `name`, which is `attempt.id` or an id, stands for. Raises CliError."""
    matches = [incident for incident in incidents if name in (incident_name(incident), str(incident.id))]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(incident_name(incident) for incident in matches or incidents)
    if matches:
        raise CliError(f"several attempts have an incident {name}", hint=f"one of {names}")
    hint = f"the job has {names}" if names else "the job has no incidents"
    raise CliError(f"no incident {name!r}", hint=hint, exit_code=ExitCode.NOT_FOUND)


@command()
def series(
    session: Session,
    job: JobArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File. Default: standard output.")] = None,
    format: Annotated[
        FileFormat | None, typer.Option("--format", help="Default: parquet if the file is named so, else csv.")
    ] = None,
    max_points: Annotated[
        int | None, typer.Option("--max-points", min=1, max=20_000, help="Most points; more steps are averaged.")
    ] = None,
) -> None:
    """Write loss, speed, world size and the task's own metrics of every step. With --json: a list of points."""
    if session.output.as_json and (out is not None or format is not None):
        raise CliError(
            "--json prints the points, so it cannot be combined with --out or --format",
            hint="leave out --json to write a file",
        )
    if str(out) == "-":
        out = None
    format = format or (FileFormat.PARQUET if out is not None and out.suffix == ".parquet" else FileFormat.CSV)
    if out is None and format is FileFormat.PARQUET:
        raise CliError("parquet is binary, and would be written to the terminal", hint="name a file with -o FILE")
    job_id = session.job_id(job)
    if session.output.as_json:
        session.show(session.client.series(job_id, max_points=max_points or 20_000), str)
        return
    with open_output(out) as file:
        session.client.save_series(job_id, file, format=format, max_points=max_points)
    if out is not None:
        session.output.say(f"{out}: {out.stat().st_size:,} bytes")


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
    """Show the jobs that have not ended, live. Ctrl-C ends it."""
    if once or not session.output.live:
        jobs, cluster = _read(session)
        session.show({"jobs": jobs, "cluster": cluster}, render_top(jobs, cluster, time.time(), _MAX_JOBS))
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
    session.show(session.client.stacks(session.job_id(job), rank=rank, native=native), render_stacks)


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
        raise CliError("--out needs the number of a profile as an argument", hint=f"shoal profiles {job} 1 --out DIR")
    job_id = session.job_id(job)
    if number is not None:
        _show_profile(session, job_id, session.client.profile(job_id, number), out)
    else:
        session.show(session.client.profiles(job_id), render_profiles)


def _show_profile(session: Session, job_id: str, view: ProfileView, out: Path | None) -> None:
    """Write the files of a profile, and show its page. Raises CliError if the profile failed."""
    if view.state == "failed":
        raise CliError(f"profile {view.number} failed: {view.reason}", exit_code=ExitCode.FAILED)
    paths = {file.name: out / file.name for file in view.files} if out is not None else {}
    for name, path in paths.items():
        with open_output(path, parents=True) as file:
            session.client.save_profile_file(job_id, view.number, name, file)
    session.show(view, render_profile)
    for path in paths.values():
        session.output.say(f"{path}: {path.stat().st_size:,} bytes")


def _show_live(session: Session, every_s: float) -> None:
    with Live(console=session.output.stdout, screen=True, auto_refresh=False) as live:
        while True:
            try:
                console = session.output.stdout
                page = render_top(*_read(session), time.time(), rows_that_fit(console.width, console.height))
                live.update(page, refresh=True)
            except (Disconnected, ServerError) as error:
                live.update(Text(f"the server does not answer ({error}); trying again ...", "yellow"), refresh=True)
            time.sleep(every_s)  # the refresh rate of the picture


def _read(session: Session) -> tuple[list[JobSummary], ClusterView]:
    active = [state for state in JobState if not state.ended]
    return list(session.client.jobs(state=active, limit=_MAX_JOBS)), session.client.cluster()
