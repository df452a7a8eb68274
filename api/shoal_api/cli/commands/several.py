"""The commands `pause`, `resume`, `cancel`, `archive` and `unarchive`, and how `delete` and `label` find their jobs:
one job, several jobs, all jobs with a label, or all for which a condition holds.

All jobs are found before any is changed, so that a mistyped name changes nothing. Once they are found, the refusal of
one does not keep the others from being changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from shoal_api.cli.session import DEFAULT_URL, JsonFlag, Session, UrlOption, command
from shoal_service.core.quantities import count_text

if TYPE_CHECKING:
    from shoal_api.cli.errors import CliError
    from shoal_api.client import Client
    from shoal_service.views import JobView
    from shoal_workers.contract.job import JobState

View = TypeVar("View")

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


WhereOption = Annotated[
    str,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Instead of JOB: all jobs for which it holds, after a question: 'loss > 3 and label.team == \"speech\"'.",
    ),
]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def _verb(verb: str, words: str, *, asks_for_labels: bool = False) -> Callable[..., None]:
    """The command that calls this method of the client for each job. `words`: its help."""

    def run(
        jobs: JobsArgument = None,
        label: LabelsOption = None,
        where: WhereOption = "",
        yes: YesFlag = False,
        url: UrlOption = DEFAULT_URL,
        as_json: JsonFlag = False,
    ) -> None:
        with command(url, as_json) as session:
            is_asked = bool(where or (asks_for_labels and label)) and not yes
            wanted = Wanted(verb, jobs or [], label or [], where, is_asked=is_asked)
            _change(session, wanted, lambda client, job_id: getattr(client, verb)(job_id))

    run.__name__, run.__doc__ = verb, words
    return run


pause = _verb("pause", "Save a checkpoint and release the workers until `resume`.")
resume = _verb("resume", "Put paused jobs back into the queue.")
cancel = _verb(
    "cancel",
    "End jobs. Their checkpoints are kept. Jobs found by --label or --where are shown first, with a question.",
    asks_for_labels=True,
)
archive = _verb(
    "archive",
    "Take jobs that have ended out of the lists. Nothing of them is deleted; `shoal jobs --archived` shows them.",
)
unarchive = _verb("unarchive", "Take archived jobs back into the lists.")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The jobs that a command was given."""

    verb: str
    names: Sequence[str]
    labels: Sequence[str]
    where: str = ""
    is_asked: bool = False
    """Whether a person confirms what labels or the condition have selected."""
    are_ids: bool = False
    """Whether the names are ids that were looked up already."""

    @property
    def is_search(self) -> bool:
        return bool(self.labels or self.where)

    def check(self) -> None:
        from shoal_api.cli.errors import CliError

        if bool(self.names) == self.is_search:
            given = "both" if self.names else "neither"
            raise CliError(
                f"{self.verb} needs JOB..., --label or --where, and was given {given}",
                hint=f"shoal {self.verb} JOB JOB, or shoal {self.verb} --label team=speech, or "
                f"shoal {self.verb} --where 'loss > 3'",
            )

    def words(self) -> str:
        return " and ".join(
            [*(f"--label {one}" for one in self.labels), *([f"--where {self.where!r}"] if self.where else [])]
        )


def found_jobs(session: Session, client: Client, wanted: Wanted) -> list[str]:
    """Return the ids of the wanted jobs, each once, after a question if one is due. Raises CliError if a name fits no
    job or several, or if no job has the labels or fits the condition."""
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode

    if wanted.are_ids:
        return list(wanted.names)
    if not wanted.is_search:
        return list(dict.fromkeys(session.job_id(client, name) for name in wanted.names))
    kind, states = _states(wanted.verb)
    where = wanted.where
    if wanted.verb == "unarchive":
        where = f"({where}) and archived" if where else "archived"
    found = list(client.jobs(state=states, label=wanted.labels, where=where))
    if not found:
        raise CliError(
            f"no {kind} has {wanted.words()}",
            hint="`shoal jobs --label` lists the jobs with a label, `shoal jobs --where` those that fit a condition",
            exit_code=ExitCode.NOT_FOUND,
        )
    if wanted.is_asked:
        ask(session, f"{wanted.verb}", [f"{one.id}  {one.name}  {one.state}" for one in found])
    return [one.id for one in found]


def ask(session: Session, verb: str, lines: Sequence[str]) -> None:
    """Show the jobs and ask whether to go on. Raises CliError if there is no terminal."""
    from shoal_api.cli.errors import CliError

    for line in lines:
        session.output.say(line)
    jobs = count_text(len(lines), "job")
    if session.output.as_json or not sys.stdin.isatty():
        raise CliError(f"this would {verb} {jobs}; there is no terminal to ask", hint="add --yes")
    typer.confirm(f"{verb.capitalize()} {'this job' if len(lines) == 1 else f'these {jobs}'}?", abort=True, err=True)


def _states(verb: str) -> tuple[str, list[JobState]]:
    """What the verb can be done to, in words, and the states of such jobs."""
    from shoal_workers.contract.job import JobState

    match verb:
        case "resume":
            return "paused job", [JobState.PAUSED, JobState.PAUSING]
        case "pause" | "cancel":
            return "job that has not ended", [one for one in JobState if not one.ended]
        case "archive" | "unarchive" | "delete":
            kind = "archived job" if verb == "unarchive" else "job that has ended"
            return kind, [one for one in JobState if one.ended]
        case _:
            return "job", []


def _change(session: Session, wanted: Wanted, change: Callable[[Client, str], JobView]) -> None:
    wanted.check()
    with session.open_client() as client:
        change_each(session, client, wanted, change, _line)


def change_each(
    session: Session,
    client: Client,
    wanted: Wanted,
    change: Callable[[Client, str], View],
    line: Callable[[View], str],
) -> None:
    """Change all wanted jobs, and print what they are then. The refusal of one does not keep the others from being
    changed; the exit code is that of the first refusal."""
    from shoal_api.cli.errors import explain
    from shoal_api.client import ApiError

    views: list[View] = []
    refused: dict[str, CliError] = {}
    job_ids = found_jobs(session, client, wanted)
    for job_id in job_ids:
        try:
            views.append(change(client, job_id))
        except ApiError as error:
            known = explain(error, session.url)
            if known is None or (len(job_ids) == 1 and not wanted.is_search):
                raise
            refused[job_id] = known
    if wanted.is_search or len(wanted.names) > 1:
        errors = [{"id": job_id, **error.document()} for job_id, error in refused.items()]
        session.output.document([*views, *errors], lambda: "\n".join(line(view) for view in views))
    else:
        session.output.document(views[0], lambda: line(views[0]))
    for job_id, refusal in refused.items():
        session.output.say(f"error: {job_id}: {refusal.message}", "bad")
    if refused:
        raise typer.Exit(next(iter(refused.values())).exit_code)


def _line(view: JobView) -> str:
    elastic = view.spec.elasticity
    return (
        f"{view.id}  {view.name}  {view.status.state}  "
        f"workers {view.status.workers} (min {elastic.min_workers}, max {elastic.max_workers}, "
        f"standby {elastic.standby})  layout {view.status.layout or '-'}"
    )
