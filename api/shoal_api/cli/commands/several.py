"""The commands for one job, several jobs, all jobs with a label, or all for which a condition holds: pause, resume,
cancel, archive, unarchive and delete; how `label` finds its jobs; and `gc`, which removes what ended jobs leave behind.

All jobs are found before any is changed, so that a mistyped name changes nothing. Then every job is changed, also if
the change of another job is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from shoal_api.cli.errors import CliError, ExitCode, explain
from shoal_api.cli.options import JobsArgument, LabelsOption, WhereOption, YesFlag
from shoal_api.cli.render.jobs import job_line
from shoal_api.cli.session import Session, command
from shoal_api.client import ApiError, Client
from shoal_service.core.quantities import count_text
from shoal_service.fleet_views import DeletionView, RemovalView
from shoal_service.views import JobView
from shoal_workers.contract import JobState

View = TypeVar("View")


def _for_each_job(
    *, asks_for_labels: bool = False
) -> Callable[[Callable[[Client, str], JobView]], Callable[..., None]]:
    """Make a command of a change of one job: it changes the jobs that JOB..., --label or --where name."""

    def decorate(change: Callable[[Client, str], JobView]) -> Callable[..., None]:
        @command()
        def run(
            session: Session,
            jobs: JobsArgument = None,
            label: LabelsOption = None,
            where: WhereOption = "",
            yes: YesFlag = False,
        ) -> None:
            asks = bool(where or (asks_for_labels and label)) and not yes
            selection = JobSelection(change.__name__, jobs or [], label or [], where, asks=asks)
            change_each(session, selection.find(session), change, _limits_line, as_list=selection.is_list)

        run.__doc__ = change.__doc__
        return run

    return decorate


@_for_each_job()
def pause(client: Client, job_id: str) -> JobView:
    """Save a checkpoint and release the workers until `resume`."""
    return client.pause(job_id)


@_for_each_job()
def resume(client: Client, job_id: str) -> JobView:
    """Put paused jobs back into the queue."""
    return client.resume(job_id)


@_for_each_job(asks_for_labels=True)
def cancel(client: Client, job_id: str) -> JobView:
    """End jobs. Their checkpoints are kept. Jobs found by --label or --where are shown first, with a question."""
    return client.cancel(job_id)


@_for_each_job()
def archive(client: Client, job_id: str) -> JobView:
    """Take jobs that have ended out of the lists. Nothing of them is deleted; `shoal jobs --archived` shows them."""
    return client.archive(job_id)


@_for_each_job()
def unarchive(client: Client, job_id: str) -> JobView:
    """Take archived jobs back into the lists."""
    return client.unarchive(job_id)


@dataclass(frozen=True, slots=True)
class JobSelection:
    """The jobs that a command was given: by name, by label, or by a condition."""

    verb: str
    names: Sequence[str]
    labels: Sequence[str]
    where: str = ""
    asks: bool = False
    """A person confirms the jobs that labels or the condition select."""

    def __post_init__(self) -> None:
        if bool(self.names) == self.is_search:
            given = "both" if self.names else "neither"
            raise CliError(
                f"{self.verb} needs JOB..., --label or --where, and was given {given}",
                hint=f"shoal {self.verb} JOB JOB, or shoal {self.verb} --label team=speech, or "
                f"shoal {self.verb} --where 'loss > 3'",
            )

    @property
    def is_search(self) -> bool:
        return bool(self.labels or self.where)

    @property
    def is_list(self) -> bool:
        """True if the result is a list, also of a single job."""
        return self.is_search or len(self.names) > 1

    def find(self, session: Session) -> list[str]:
        """Return the ids of the jobs, each once, after a question if `asks`. Raises CliError if a name matches no job
        or several, or if the search finds none."""
        if not self.is_search:
            return list(dict.fromkeys(session.job_id(name) for name in self.names))
        kind, states = _SEARCHED[self.verb]
        where = self.where
        if self.verb == "unarchive":
            where = f"({where}) and archived" if where else "archived"
        jobs = list(session.client.jobs(state=states, label=self.labels, where=where))
        if not jobs:
            conditions = [f"--label {label}" for label in self.labels]
            conditions += [f"--where {self.where!r}"] if self.where else []
            raise CliError(
                f"no {kind} has {' and '.join(conditions)}",
                hint="`shoal jobs --label` lists the jobs with a label, `shoal jobs --where` those that fit a "
                "condition",
                exit_code=ExitCode.NOT_FOUND,
            )
        if self.asks:
            for job in jobs:
                session.output.say(f"{job.id}  {job.name}  {job.state}")
            number = count_text(len(jobs), "job")
            question = f"{self.verb.capitalize()} {'this job' if len(jobs) == 1 else f'these {number}'}?"
            session.confirm(question, consequence=f"this would {self.verb} {number}")
        return [job.id for job in jobs]


_ENDED = tuple(state for state in JobState if state.ended)
_ACTIVE = tuple(state for state in JobState if not state.ended)
_SEARCHED = {
    "pause": ("job that has not ended", _ACTIVE),
    "resume": ("paused job", (JobState.PAUSED, JobState.PAUSING)),
    "cancel": ("job that has not ended", _ACTIVE),
    "archive": ("job that has ended", _ENDED),
    "unarchive": ("archived job", _ENDED),
    "delete": ("job that has ended", _ENDED),
    "label": ("job", ()),
}
"""What a verb changes, for messages, and the states of such jobs."""


def change_each(
    session: Session,
    job_ids: Sequence[str],
    change: Callable[[Client, str], View],
    line: Callable[[View], str],
    *,
    as_list: bool,
) -> None:
    """Change all jobs, and print what they are then. If `as_list`, the refusal of one does not keep the others from
    being changed, and the exit code is that of the first refusal."""
    views: list[View] = []
    refused: dict[str, CliError] = {}
    for job_id in job_ids:
        try:
            views.append(change(session.client, job_id))
        except ApiError as error:
            refusal = explain(error, session.url)
            if refusal is None or not as_list:
                raise
            refused[job_id] = refusal
    if as_list:
        errors = [{"id": job_id, **refusal.document()} for job_id, refusal in refused.items()]
        session.show([*views, *errors], "\n".join(line(view) for view in views))
    else:
        session.show(views[0], line)
    for job_id, refusal in refused.items():
        session.output.say(f"error: {job_id}: {refusal.message}", "bad")
    if refused:
        raise typer.Exit(next(iter(refused.values())).exit_code)


def _limits_line(job: JobView) -> str:
    elastic = job.spec.elasticity
    limits = f"(min {elastic.min_workers}, max {elastic.max_workers}, standby {elastic.standby})"
    return job_line(job, f"workers {job.status.workers} {limits}", f"layout {job.status.layout or '-'}")


@command()
def delete(
    session: Session,
    jobs: JobsArgument = None,
    label: LabelsOption = None,
    where: WhereOption = "",
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Leave its files in the storage.")
    ] = False,
    yes: YesFlag = False,
) -> None:
    """Delete jobs that have ended, with their histories and checkpoints. It cannot be undone.

    Pinned checkpoints stay in the storage. A job that has not ended is refused: `shoal cancel` ends it.
    """
    selection = JobSelection("delete", jobs or [], label or [], where, asks=not yes)
    if selection.is_search:
        job_ids = selection.find(session)
    else:
        job_ids = list(dict.fromkeys(_find_deletable(session, name) for name in selection.names))
        if not yes:
            files = "" if keep_checkpoints else " and its checkpoints"
            session.confirm(f"Delete job {' '.join(job_ids)}{files}? This cannot be undone.")
    change_each(
        session,
        job_ids,
        lambda client, job_id: client.delete_job(job_id, checkpoints=not keep_checkpoints),
        _describe_deletion,
        as_list=selection.is_list,
    )


@command()
def gc(
    session: Session,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
) -> None:
    """Delete now what ended jobs leave behind and is older than the server's settings SHOAL_RETAIN_... allow.

    The server does it by itself every SHOAL_GC_EVERY_S seconds.
    """
    view = session.client.gc(dry_run=dry_run)
    removals = list(view.removals)
    while not view.is_complete and not dry_run and any(not removal.error for removal in view.removals):
        view = session.client.gc()
        removals += view.removals
    lines = [_removal_line(removal) for removal in removals]
    if dry_run and not view.is_complete:
        lines.append("... and more")
    result = view.model_copy(update={"removals": tuple(removals)})
    session.show(result, "\n".join(lines) or "nothing is old enough to be deleted")


def _find_deletable(session: Session, reference: str) -> str:
    """Return the id of a job, also if its deletion was begun: to delete it again does no harm."""
    if any(deletion.job_id == reference for deletion in session.client.deletions(limit=1000)):
        return reference
    return session.job_id(reference)


def _describe_deletion(view: DeletionView) -> str:
    if view.finished_at is None:
        return f"{view.job_id}  {view.name}  not complete: {view.error}\nthe server tries again"
    files = "with its checkpoints" if view.with_checkpoints else f"its files stay in {view.root}"
    head = f"{view.job_id}  {view.name}  deleted, {files} ({count_text(view.rows, 'row')})"
    return "\n".join([head, *(f"pinned, stays: {url}" for url in view.kept)])


def _removal_line(removal: RemovalView) -> str:
    job = f"{removal.job_id}  " if removal.job_id else ""
    rows = count_text(removal.rows, "row") if removal.rows else ""
    result = f"not deleted: {removal.error}" if removal.error else rows
    return "  ".join(filter(None, (f"{removal.kind.value:<10} {job}{removal.name}", result, removal.reason)))
