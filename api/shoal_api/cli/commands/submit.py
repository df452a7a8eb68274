"""`submit` and `watch`: start a job, and follow one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.session import (
    DEFAULT_URL,
    JobArgument,
    JsonFlag,
    Session,
    SpecArgument,
    UrlOption,
    command,
    exit_code_of,
)

if TYPE_CHECKING:
    from shoal_api.client import Client
    from shoal_service.views import JobView


def submit(
    spec: SpecArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show progress until the job ends.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show layouts and expected start; submit nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait without output until the job ends.")] = False,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change the spec; may be repeated.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the job; replaces the one in the spec.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", min=-1000, max=1000, help="Higher gets workers first.")
    ] = None,
    project: Annotated[str | None, typer.Option("--project", help="Whose share of the cluster the job uses.")] = None,
    user: Annotated[
        str | None, typer.Option("--user", help="Whose job it is; without it the spec's, or your login name.")
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="JOB[@STEP]", help="Go on from a checkpoint of this job, the newest one without a step."
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job. With --follow or --wait the exit code is that of the job: 0 succeeded, 1 failed or cancelled."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.queue_page import dry_run_page
        from shoal_api.cli.spec_file import load_spec
        from shoal_workers.contract.checks.spec_errors import parse_spec

        options = {"name": name, "priority": priority, "project": project, "user": user}
        document = load_spec(spec, assignments or (), options)
        parse_spec(document)
        with session.open_client() as client:
            if from_ is not None:
                document["continue_from"] = _origin(session, client, from_)
            if dry_run:
                found = client.dry_run(document)
                session.output.document(found, lambda: dry_run_page(found, time.time()))
                return
            job = client.submit(document)
        output = session.output
        if not follow and not wait:
            note = f"{job.status.note}\n" if job.status.note else ""
            output.document(job, lambda: f"{job.id}  {job.name}  {job.status.state}\n{note}shoal watch {job.id}")
            return
        output.say(f"submitted {job.id} ({job.name})", "dim")
        ended = _follow(session, job.id) if follow else _wait(session, job.id)
        _finish(session, ended, one_line=follow)


def watch(job: JobArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Follow a job from its first event until it ends. Ctrl-C detaches; the job continues."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            job_id = session.job_id(client, job)
        _finish(session, _follow(session, job_id), one_line=True)


def _follow(session: Session, job_id: str) -> JobView:
    from shoal_api.cli.follow import follow_job
    from shoal_api.cli.render.progress import screen_for

    try:
        return follow_job(session.open_client, job_id, screen_for(session.output))
    except KeyboardInterrupt:
        _detached(session, job_id)
        raise


def _wait(session: Session, job_id: str) -> JobView:
    try:
        with session.open_client() as client:
            return client.wait(job_id)
    except KeyboardInterrupt:
        _detached(session, job_id)
        raise


def _detached(session: Session, job_id: str) -> None:
    option = "" if session.url == DEFAULT_URL else f" --url {session.url}"
    session.output.say(
        f"\ndetached; the job continues. Follow it again: shoal watch {job_id}{option}\n"
        f"End it: shoal cancel {job_id}{option}",
        "warn",
    )


def _finish(session: Session, job: JobView, *, one_line: bool) -> None:
    from shoal_api.cli.render.job_page import job_page

    if session.output.as_json and one_line:
        session.output.line(job, "")
    elif session.output.as_json:
        session.output.document(job, str)
    else:
        with session.open_client() as client:
            series = client.series(job.id)
        session.output.document(job, lambda: job_page(job, series, time.time()))
    code = exit_code_of(job.status.state)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


def _origin(session: Session, client: Client, text: str) -> dict[str, object]:
    """`continue_from` of a spec, from JOB or JOB@STEP. The names of jobs have no @."""
    from shoal_api.cli.errors import CliError

    reference, at, step = text.partition("@")
    if at and not (step.isascii() and step.isdigit() and int(step) > 0):
        hint = "for example: --from my-job@120; without @ the newest checkpoint is taken"
        raise CliError(f"--from {text!r}: {step!r} is not a step", hint=hint)
    job_id = session.job_id(client, reference)
    return {"job": job_id, **({"step": int(step)} if at else {})}
