"""`shoal backup` and `shoal restore`: the database of a server, on the machine of its settings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JsonFlag, command
from shoal_service.core.quantities import count_text

if TYPE_CHECKING:
    from shoal_service.settings import Settings
    from shoal_service.store.backup import Contents

StateDir = Annotated[Path | None, typer.Option("--state-dir", help="Directory of the server's state.")]
DatabaseUrl = Annotated[str | None, typer.Option("--database-url", help="As of `shoal serve`.")]


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
