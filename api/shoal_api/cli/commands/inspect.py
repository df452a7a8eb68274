"""Commands that only read: jobs, show, logs, events, workers, checkpoints, cluster, webhooks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from shoal_api.answers import log_source
from shoal_api.cli.errors import CliError
from shoal_api.cli.options import JobArgument
from shoal_api.cli.output import complete_file
from shoal_api.cli.render.fleet import cluster_page, webhooks_table
from shoal_api.cli.render.jobs import checkpoints_table, fields_table, job_page, jobs_table, workers_table
from shoal_api.cli.render.progress import event_text, style
from shoal_api.cli.render.terminal import clock
from shoal_api.cli.session import Session, command
from shoal_api.client import JobsQuery
from shoal_service.control.spec_io import encode
from shoal_service.core.quantities import count_text
from shoal_service.views import JobView
from shoal_workers.contract.job import JobState
from shoal_workers.contract.messages import LogStream

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
        typer.Option("--where", metavar="CONDITION", help="Only such jobs: 'lr > 1e-3 and state == \"FAILED\"'."),
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", metavar="NAMES", help="Order, such as --sort=-loss,created; a dash reverses.")
    ] = "",
    columns: Annotated[
        str, typer.Option("--columns", metavar="NAMES", help="What to show, such as loss,optimizer.lr,label.team.")
    ] = "",
    archived: Annotated[bool, typer.Option("--archived", help="Also archived jobs.")] = False,
    fields: Annotated[
        bool, typer.Option("--fields", help="Instead list the names that the options above know.")
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
    if fields:
        session.show(session.client.job_fields(), fields_table)
        return
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
    files = {format: path for format, path in (("csv", csv), ("parquet", parquet)) if path is not None}
    for format, path in files.items():
        _export(session, path, format, query, limit)
    if files:
        return
    names = [name.strip() for name in columns.split(",") if name.strip()]
    has_filter = any((state, project, user, label, search, where))
    session.show(
        list(session.client.jobs(**query, limit=limit or _DEFAULT_LIMIT)),
        lambda jobs: jobs_table(jobs, time.time(), names, has_filter=has_filter),
    )


def _export(session: Session, path: Path, format: str, query: JobsQuery, limit: int | None) -> None:
    """Write the file, or CSV to the standard output if the path is `-`."""
    if str(path) == "-":
        if format != "csv":
            raise CliError(f"--{format} - writes bytes that are no text", hint=f"name a file: --{format} FILE")
        session.client.export_jobs(sys.stdout.buffer, format=format, limit=limit, **query)
        return
    with complete_file(path) as file:
        num_jobs = session.client.export_jobs(file, format=format, limit=limit, **query)
    session.output.say(f"{count_text(num_jobs, 'job')} in {path}")


@command()
def show(
    session: Session,
    job: JobArgument,
    spec: Annotated[
        bool, typer.Option("--spec", help="Its spec as YAML: only what differs from the defaults.")
    ] = False,
) -> None:
    """Show a job: state, progress, loss, and what it waits for or why it failed."""
    job_id = session.job_id(job)
    view = session.client.job(job_id)
    if spec:
        session.show(view.spec, lambda spec: encode(spec).rstrip())
        return
    series = [] if session.output.as_json else session.client.series(job_id)
    several = not session.output.as_json and len(session.client.clusters()) > 1
    session.show(view, lambda job: job_page(job, series, time.time(), several_clusters=several))


@command()
def logs(
    session: Session,
    job: JobArgument,
    follow: FollowFlag = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only the last N lines.")] = None,
) -> None:
    """Print the log of a job, with the time and the rank of each line. Lines with [job] say what happens to it.

    With --json: one list, or with --follow one line per entry.
    """
    job_id = session.job_id(job)
    lines = session.client.logs(job_id, rank=rank, tail=tail, follow=follow)
    if session.output.as_json and not follow:
        session.show(list(lines), str)
        return
    has_printed = False
    for line in lines:
        has_printed = has_printed or line.stream is not LogStream.SHOAL
        text = f"{clock(line.at)} [{log_source(line)}] {line.text.rstrip()}"
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
        session.output.line(event, event_text(event), style(event))


@command()
def workers(session: Session, job: JobArgument) -> None:
    """List the workers of a job: rank, node, pid, phase."""
    session.show(session.client.workers(session.job_id(job)), workers_table)


@command()
def checkpoints(session: Session, job: JobArgument) -> None:
    """List the checkpoints of a job."""
    session.show(session.client.checkpoints(session.job_id(job)), checkpoints_table)


@command()
def cluster(session: Session) -> None:
    """Show the nodes of the cluster and its free resources, as the scheduler sees them."""
    session.show(session.client.cluster(), cluster_page)


@command()
def webhooks(
    session: Session,
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Id or name of a job; without it: all jobs together.")
    ] = None,
) -> None:
    """Show what webhooks have delivered, and which receivers fail."""
    hooks = session.client.webhooks(None if job is None else session.job_id(job))
    session.show(hooks, lambda hooks: webhooks_table(hooks, time.time()))


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
        return f"{who} has printed none of the last {tail} lines"
    return f"{who} has printed nothing" + ("" if job.status.state.ended else f" so far; the job is {job.status.state}")
