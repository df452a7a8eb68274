"""The commands `pause`, `resume` and `cancel`. They take one job, several jobs, or all jobs with a label.

All jobs are found before any is changed, so that a mistyped name changes nothing. Once they are found, the refusal of
one does not keep the others from being changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JsonFlag, Session, UrlOption, command

if TYPE_CHECKING:
    from shoal_api.cli.errors import CliError
    from shoal_api.client import Client
    from shoal_service.views import JobView

JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="JOB...", help="Ids, unique beginnings of ids, or unique names of jobs."),
]
LabelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="NAME[=VALUE]",
        help="Instead of JOB: all jobs with this label; also !NAME and NAME!=VALUE. May be repeated.",
    ),
]


def pause(
    jobs: JobsArgument = None, label: LabelsOption = None, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False
) -> None:
    """Save a checkpoint and release the workers until `resume`."""
    with command(url, as_json) as session:
        _change(session, _Wanted("pause", jobs or [], label or []), lambda client, job_id: client.pause(job_id))


def resume(
    jobs: JobsArgument = None, label: LabelsOption = None, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False
) -> None:
    """Put paused jobs back into the queue."""
    with command(url, as_json) as session:
        _change(session, _Wanted("resume", jobs or [], label or []), lambda client, job_id: client.resume(job_id))


def cancel(
    jobs: JobsArgument = None,
    label: LabelsOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --label: do not ask.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """End jobs. Their checkpoints are kept."""
    with command(url, as_json) as session:
        wanted = _Wanted("cancel", jobs or [], label or [], is_asked=bool(label) and not yes)
        _change(session, wanted, lambda client, job_id: client.cancel(job_id))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The jobs that a command was given."""

    verb: str
    names: Sequence[str]
    labels: Sequence[str]
    is_asked: bool = False
    """Whether a person confirms what the labels have selected."""

    def check(self) -> None:
        from shoal_api.cli.errors import CliError

        if bool(self.names) == bool(self.labels):
            given = "both" if self.names else "neither"
            raise CliError(
                f"{self.verb} needs JOB... or --label, and was given {given}",
                hint=f"shoal {self.verb} JOB JOB, or shoal {self.verb} --label team=speech",
            )


def _change(session: Session, wanted: _Wanted, change: Callable[[Client, str], JobView]) -> None:
    from shoal_api.cli.errors import explain
    from shoal_api.client import ApiError

    wanted.check()
    views: list[JobView] = []
    refused: dict[str, CliError] = {}
    with session.open_client() as client:
        job_ids = _find(session, client, wanted)
        for job_id in job_ids:
            try:
                views.append(change(client, job_id))
            except ApiError as error:
                known = explain(error, session.url)
                if known is None or (len(job_ids) == 1 and not wanted.labels):
                    raise
                refused[job_id] = known
    if wanted.labels or len(wanted.names) > 1:
        errors = [{"id": job_id, **error.document()} for job_id, error in refused.items()]
        session.output.document([*views, *errors], lambda: "\n".join(_line(view) for view in views))
    else:
        session.output.document(views[0], lambda: _line(views[0]))
    for job_id, refusal in refused.items():
        session.output.say(f"error: {job_id}: {refusal.message}", "bad")
    if refused:
        raise typer.Exit(next(iter(refused.values())).exit_code)


def _find(session: Session, client: Client, wanted: _Wanted) -> list[str]:
    """Return the ids of the wanted jobs, each once. Raises CliError if a name fits no job or several, or if no job has
    the labels."""
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode
    from shoal_workers.contract.job import JobState

    if not wanted.labels:
        return list(dict.fromkeys(session.job_id(client, name) for name in wanted.names))
    states = (
        [JobState.PAUSED, JobState.PAUSING] if wanted.verb == "resume" else [one for one in JobState if not one.ended]
    )
    found = list(client.jobs(state=states, label=wanted.labels))
    if not found:
        kind = "paused job" if wanted.verb == "resume" else "job that has not ended"
        raise CliError(
            f"no {kind} has --label {' --label '.join(wanted.labels)}",
            hint="`shoal jobs --label` lists the jobs with a label",
            exit_code=ExitCode.NOT_FOUND,
        )
    if wanted.is_asked:
        for one in found:
            session.output.say(f"{one.id}  {one.name}  {one.state}")
        if session.output.as_json or not sys.stdin.isatty():
            raise CliError(f"this would {wanted.verb} {len(found)} jobs; there is no terminal to ask", hint="add --yes")
        typer.confirm(f"{wanted.verb.capitalize()} these {len(found)} jobs?", abort=True, err=True)
    return [one.id for one in found]


def _line(view: JobView) -> str:
    elastic = view.spec.elasticity
    return (
        f"{view.id}  {view.name}  {view.status.state}  "
        f"workers {view.status.workers} (min {elastic.min_workers}, max {elastic.max_workers}, "
        f"standby {elastic.standby})  layout {view.status.layout or '-'}"
    )
