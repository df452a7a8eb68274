"""`delete` and `gc`: remove jobs that have ended, and what they leave behind."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_api.cli.commands.several import JobSelection, change_each
from shoal_api.cli.options import JobsArgument, LabelsOption, WhereOption, YesFlag
from shoal_api.cli.session import Session, command
from shoal_service.core.quantities import count_text
from shoal_service.fleet_views import DeletionView, RemovalView


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
