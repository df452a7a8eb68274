"""Commands that keep a service in order: `delete` and `gc` for jobs that have ended and what they leave behind,
`backup` and `restore` for the database of a server, on the machine of its settings.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.commands.several import JobsArgument, LabelsOption, Wanted, WhereOption, change_each
from shoal_api.cli.session import DEFAULT_URL, JsonFlag, UrlOption, command
from shoal_service.core.quantities import count_text

if TYPE_CHECKING:
    from shoal_service.fleet_views import DeletionView, RemovalView
    from shoal_service.settings import Settings
    from shoal_service.store.backup import Contents

StateDir = Annotated[Path | None, typer.Option("--state-dir", help="Directory of the server's state.")]
DatabaseUrl = Annotated[str | None, typer.Option("--database-url", help="As of `shoal serve`.")]


def delete(
    jobs: JobsArgument = None,
    label: LabelsOption = None,
    where: WhereOption = "",
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Leave its files in the storage.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Delete jobs that have ended, with their histories and checkpoints. It cannot be undone.

    Pinned checkpoints stay in the storage. A job that has not ended is refused: `shoal cancel` ends it.
    """
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError

        wanted = Wanted("delete", jobs or [], label or [], where, is_asked=bool(label or where) and not yes)
        wanted.check()
        with session.open_client() as client:
            if not wanted.is_search:
                ids = tuple(dict.fromkeys(session.deletable(client, name) for name in wanted.names))
                wanted = replace(wanted, names=ids, are_ids=True)
                if not yes:
                    if as_json or not sys.stdin.isatty():
                        raise CliError("this cannot be undone; there is no terminal to ask", hint="add --yes")
                    what = "" if keep_checkpoints else " and its checkpoints"
                    typer.confirm(f"Delete job {' '.join(ids)}{what}? This cannot be undone.", abort=True, err=True)
            change_each(
                session,
                client,
                wanted,
                lambda client, job_id: client.delete_job(job_id, checkpoints=not keep_checkpoints),
                lambda view: "\n".join(_lines(view)),
            )


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
        return [f"{view.job_id}  {view.name}  not complete: {view.error}", "the server tries again"]
    files = "with its checkpoints" if view.with_checkpoints else f"its files stay in {view.root}"
    return [
        f"{view.job_id}  {view.name}  deleted, {files} ({count_text(view.rows, 'row')})",
        *(f"pinned, stays: {url}" for url in view.kept),
    ]


def _removal_line(one: RemovalView) -> str:
    where = f"{one.job_id}  " if one.job_id else ""
    result = f"not deleted: {one.error}" if one.error else (count_text(one.rows, "row") if one.rows else "")
    return "  ".join(filter(None, (f"{one.kind.value:<10} {where}{one.name}", result, one.reason)))


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file for the backup.")],
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the database of a server into a file: jobs, histories, code archives, quotas. The server may run.

    Checkpoints are not part of it. PostgreSQL needs the program pg_dump.
    """
    with command(DEFAULT_URL, as_json) as session:
        from shoal_service.store.backup import back_up, mark_backup

        settings = _settings(state_dir, database_url)
        contents = back_up(settings.database_url, file)
        mark_backup(settings.state_dir)
        session.output.document({"file": str(file), **_document(contents)}, lambda: f"{file}: {_line(contents)}")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `shoal backup` has written.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace a database that exists.")] = False,
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a database of a backup, bring it to the newest schema, and check it. No server may run meanwhile.

    What happened after the backup is lost; jobs continue from their newest checkpoints.
    """
    with command(DEFAULT_URL, as_json) as session:
        from shoal_service.state_lock import StateLock
        from shoal_service.store.backup import restore as restore_file

        settings = _settings(state_dir, database_url)
        with StateLock.take(settings.state_dir):
            done = restore_file(settings.database_url, file, replace=replace, now=time.time())
        lines = [f"restored and checked: {_line(done.contents)}"]
        if done.aside is not None:
            lines.append(f"the database before is {done.aside}")
        document = {"aside": None if done.aside is None else str(done.aside), **_document(done.contents)}
        session.output.document(document, lambda: "\n".join(lines))


def _settings(state_dir: Path | None, database_url: str | None) -> Settings:
    from shoal_service.settings import load_settings

    given = {"state_dir": state_dir, "database_url": database_url}
    return load_settings(**{key: value for key, value in given.items() if value is not None})


def _document(contents: Contents) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(contents)


def _line(contents: Contents) -> str:
    unreadable = f", {contents.unreadable} of them not readable by this release" if contents.unreadable else ""
    return (
        f"{count_text(contents.jobs, 'job')}{unreadable}, {count_text(contents.events, 'event')}, "
        f"{contents.archives} code archives, "
        f"schema {contents.schema}"
    )
