"""Commands that only read: jobs, show, logs, events, workers, checkpoints, cluster, webhooks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, Session, UrlOption, command
from shoal_service.core.quantities import count_text

if TYPE_CHECKING:
    from shoal_api.client import Client
    from shoal_service.views import JobView, LogView

_SHOWN = 100
"""Jobs that are listed if no limit is given."""
FollowFlag = Annotated[bool, typer.Option("--follow", "-f", help="Continue with new entries until the job ends.")]


def jobs(
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
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """List jobs, newest first. Conditions, orders and columns can use all settings, metrics and labels."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.jobs import fields_table, jobs_table

        with session.open_client() as client:
            if fields:
                known = client.job_fields()
                session.output.document(known, lambda: fields_table(known))
                return
            asked: dict[str, Any] = {
                "state": _states(state or []),
                "project": project,
                "user": user,
                "label": label or (),
                "search": search,
                "where": where,
                "sort": sort,
                "columns": columns,
                "archived": archived,
            }
            files = {format: path for format, path in (("csv", csv), ("parquet", parquet)) if path is not None}
            for format, path in files.items():
                _export(session, client, path, format, asked | {"limit": limit})
            if files:
                return
            found = list(client.jobs(**asked, limit=limit or _SHOWN))
        names = [name.strip() for name in columns.split(",") if name.strip()]
        has_filter = any((state, project, user, label, search, where))
        session.output.document(found, lambda: jobs_table(found, time.time(), names, has_filter=has_filter))


def _export(session: Session, client: Client, path: Path, format: str, asked: dict[str, Any]) -> None:
    """Writes the file, or CSV to the standard output if the path is `-`. A file that breaks off is not left behind."""
    from shoal_api.cli.errors import CliError

    if str(path) == "-":
        if format != "csv":
            raise CliError(f"--{format} - writes bytes that are no text", hint=f"name a file: --{format} FILE")
        client.export_jobs(sys.stdout.buffer, format=format, **asked)
        return
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            num_jobs = client.export_jobs(file, format=format, **asked)
        part.replace(path)
    except OSError as error:
        raise CliError(f"--{format} {path} cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    session.output.say(f"{count_text(num_jobs, 'job')} in {path}")


def show(
    job: JobArgument,
    spec: Annotated[
        bool, typer.Option("--spec", help="Its spec as YAML: only what differs from the defaults.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Show a job: state, progress, loss, and what it waits for or why it failed."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.jobs import job_page
        from shoal_service.control.spec_io import encode

        with session.open_client() as client:
            job_id = session.job_id(client, job)
            view = client.job(job_id)
            if spec:
                session.output.document(view.spec, lambda: encode(view.spec).rstrip())
                return
            series = [] if as_json else client.series(job_id)
            several = not as_json and len(client.clusters()) > 1
        session.output.document(view, lambda: job_page(view, series, time.time(), several_clusters=several))


def logs(
    job: JobArgument,
    follow: FollowFlag = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only the last N lines.")] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Print the log of a job, with the time and the rank of each line. Lines with [job] say what happens to it.

    With --json: one list, or with --follow one line per entry.
    """
    with command(url, as_json) as session:
        from shoal_workers.contract.messages import LogStream

        with session.open_client() as client:
            job_id = session.job_id(client, job)
            lines = client.logs(job_id, rank=rank, tail=tail, follow=follow)
            if as_json and not follow:
                session.output.document(list(lines), str)
                return
            has_printed = False
            for line in lines:
                has_printed = has_printed or line.stream is not LogStream.SHOAL
                session.output.line(line, _log_text(line), "dim" if line.stream is LogStream.SHOAL else "plain")
            if not has_printed:
                session.output.say(_silence(client.job(job_id), rank, tail), "dim")


def events(
    job: JobArgument, follow: FollowFlag = False, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False
) -> None:
    """Print the events of a job. With --json: one list, or with --follow one line per event."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.progress import event_text, style

        with session.open_client() as client:
            job_id = session.job_id(client, job)
            history = client.events(job_id, follow=follow)
            if as_json and not follow:
                session.output.document(list(history), str)
                return
            for event in history:
                session.output.line(event, event_text(event), style(event))


def workers(job: JobArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List the workers of a job: rank, node, pid, phase."""
    from shoal_api.cli.render.jobs import workers_table

    _list(job, url, as_json, lambda client, job_id: client.workers(job_id), workers_table)


def checkpoints(job: JobArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List the checkpoints of a job."""
    from shoal_api.cli.render.jobs import checkpoints_table

    _list(job, url, as_json, lambda client, job_id: client.checkpoints(job_id), checkpoints_table)


def cluster(url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Show the nodes of the cluster and its free resources, as the scheduler sees them."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.fleet import cluster_page

        with session.open_client() as client:
            view = client.cluster()
        session.output.document(view, lambda: cluster_page(view))


def webhooks(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Id or name of a job; without it: all jobs together.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Show what webhooks have delivered, and which receivers fail."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.fleet import webhooks_table

        with session.open_client() as client:
            found = client.webhooks(None if job is None else session.job_id(client, job))
        session.output.document(found, lambda: webhooks_table(found, time.time()))


def _list(job: str, url: str, as_json: bool, fetch: Callable[[Client, str], Any], table: Callable[[Any], Any]) -> None:
    with command(url, as_json) as session:
        with session.open_client() as client:
            rows = fetch(client, session.job_id(client, job))
        session.output.document(rows, lambda: table(rows))


def _states(names: list[str]) -> list[Any]:
    from shoal_api.cli.errors import CliError
    from shoal_workers.contract.job import JobState

    known = {state.value: state for state in JobState}
    for name in names:
        if name.upper() not in known:
            raise CliError(f"--state {name!r} is not a state of a job", hint=f"use one of {', '.join(known)}")
    return [known[name.upper()] for name in names]


def _log_text(line: LogView) -> str:
    from shoal_api.answers import log_source
    from shoal_api.cli.render.terminal import clock

    return f"{clock(line.at)} [{log_source(line)}] {line.text.rstrip()}"


def _silence(job: JobView, rank: int | None, tail: int | None) -> str:
    """Say why the lines have nothing that the task printed."""
    who = "the task" if rank is None else f"rank {rank}"
    if tail is not None:
        return f"{who} has printed none of the last {tail} lines"
    return f"{who} has printed nothing" + ("" if job.status.state.ended else f" so far; the job is {job.status.state}")
