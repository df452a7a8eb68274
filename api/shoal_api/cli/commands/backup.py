"""`backup` and `restore` of the database of a server, on the machine of its settings."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.options import given
from shoal_api.cli.session import Session, command
from shoal_service.core.quantities import count_text
from shoal_service.settings import load_settings
from shoal_service.state_lock import StateLock
from shoal_service.store.backup import Contents, back_up, mark_backup
from shoal_service.store.backup import restore as restore_file

StateDir = Annotated[Path | None, typer.Option("--state-dir", help="Directory of the server's state.")]
DatabaseUrl = Annotated[str | None, typer.Option("--database-url", help="As of `shoal serve`.")]


@command(url=False)
def backup(
    session: Session,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file for the backup.")],
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Write the database of a server into a file: jobs, histories, code archives, quotas. The server may run.

    Checkpoints are not part of it. PostgreSQL needs the program pg_dump.
    """
    settings = load_settings(**given(state_dir=state_dir, database_url=database_url))
    contents = back_up(settings.database_url, file)
    mark_backup(settings.state_dir)
    session.show({"file": str(file), **asdict(contents)}, f"{file}: {_describe(contents)}")


@command(url=False)
def restore(
    session: Session,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `shoal backup` has written.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace a database that exists.")] = False,
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a database of a backup, bring it to the newest schema, and check it. No server may run meanwhile.

    What happened after the backup is lost; jobs continue from their newest checkpoints.
    """
    settings = load_settings(**given(state_dir=state_dir, database_url=database_url))
    with StateLock.take(settings.state_dir):
        result = restore_file(settings.database_url, file, replace=replace, now=time.time())
    lines = [f"restored and checked: {_describe(result.contents)}"]
    if result.aside is not None:
        lines.append(f"the database before is {result.aside}")
    aside = None if result.aside is None else str(result.aside)
    session.show({"aside": aside, **asdict(result.contents)}, "\n".join(lines))


def _describe(contents: Contents) -> str:
    unreadable = f", {contents.unreadable} of them not readable by this release" if contents.unreadable else ""
    return (
        f"{count_text(contents.jobs, 'job')}{unreadable}, {count_text(contents.events, 'event')}, "
        f"{contents.archives} code archives, "
        f"schema {contents.schema}"
    )
