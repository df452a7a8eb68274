"""`shoal delete` and `shoal gc`: jobs that have ended, and what they leave behind."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, UrlOption, command
from shoal_service.core.quantities import count_text

if TYPE_CHECKING:
    from shoal_service.fleet_views import DeletionView, RemovalView


def delete(
    job: JobArgument,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Leave its files in the storage.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Delete a job that has ended, with its history and its checkpoints. It cannot be undone.

    Pinned checkpoints stay in the storage. A job that has not ended is refused: `shoal cancel` ends it.
    """
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError

        with session.open_client() as client:
            job_id = session.deletable(client, job)
            if not yes:
                if as_json or not sys.stdin.isatty():
                    raise CliError("this cannot be undone; there is no terminal to ask", hint="add --yes")
                what = "" if keep_checkpoints else " and its checkpoints"
                typer.confirm(f"Delete job {job_id}{what}? This cannot be undone.", abort=True, err=True)
            view = client.delete_job(job_id, checkpoints=not keep_checkpoints)
        session.output.document(view, lambda: "\n".join(_lines(view)))


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Delete now what ended jobs leave behind and is older than the server's settings SHOAL_RETAIN_... allow.

    The server does it by itself every SHOAL_GC_EVERY_S seconds.
    """
    with command(url, as_json) as session, session.open_client() as client:
        view = client.gc(dry_run=dry_run)
        found = list(view.removals)
        while not view.is_complete and not dry_run and any(not one.error for one in view.removals):
            view = client.gc()
            found += view.removals
        whole = view.model_copy(update={"removals": tuple(found)})
        lines = [_removal_line(one) for one in found]
        if dry_run and not view.is_complete:
            lines.append("... and more")
        session.output.document(whole, lambda: "\n".join(lines) or "nothing is old enough to be deleted")


def _lines(view: DeletionView) -> list[str]:
    if view.finished_at is None:
        return [f"{view.job_id}  {view.name}  not complete: {view.error}", "the server goes on with it by itself"]
    files = "with its checkpoints" if view.with_checkpoints else f"its files stay in {view.root}"
    return [
        f"{view.job_id}  {view.name}  deleted, {files} ({count_text(view.rows, 'row')})",
        *(f"pinned, stays: {url}" for url in view.kept),
    ]


def _removal_line(one: RemovalView) -> str:
    where = f"{one.job_id}  " if one.job_id else ""
    result = f"not deleted: {one.error}" if one.error else (count_text(one.rows, "row") if one.rows else "")
    return "  ".join(filter(None, (f"{one.kind.value:<10} {where}{one.name}", result, one.reason)))
