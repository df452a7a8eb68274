"""The client programs of PostgreSQL: pg_dump, pg_restore and psql. The password is never in their arguments.

A restore changes nothing until the backup is proven, and then everything in one transaction:

    1. load   one transaction of psql: Shoal's tables step aside, the archive is played, its tables go to the schema
              STAGED, the others step back. The archive is read to its end before the COMMIT is sent.
    2. check  the caller migrates and checks `staged`, whose search path is that schema
    3. swap   one transaction: the old tables are dropped, the new ones take their place

An error, a kill or a power failure before 3. leaves the database as it was, beside a schema that the next restore
removes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import inspect, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL

from shoal_service.store.database import Database
from shoal_service.store.errors import BackupError
from shoal_service.store.tables import metadata

MAGIC = b"PGDMP"
STAGED = "shoal_restored"
_ASIDE = "shoal_aside"
"""A schema that exists within one transaction only."""
_VERSIONS = "alembic_version"
_INSTALLED = Path("/usr/lib/postgresql")
_IDENTIFIERS = postgresql.dialect().identifier_preparer  # type: ignore[no-untyped-call]
_DUMPED = ("--no-owner", "--no-privileges")


def dump(url: URL, target: Path) -> None:
    """Dumps one consistent snapshot, while others write. Raises BackupError."""
    _run("pg_dump", "--format=custom", *_DUMPED, f"--file={target}", url=url)
    verify(target)


def verify(source: Path) -> None:
    """Reads the whole archive. Raises BackupError: it is damaged, or it is not one of Shoal."""
    if _VERSIONS not in {table for _, table in _listed(source)}:
        raise BackupError(f"{source} has no table {_VERSIONS}: it is not a backup of Shoal's database.")
    _run("pg_restore", f"--file={os.devnull}", str(source))


def is_used(database: Database) -> bool:
    """Return whether there are tables of Shoal."""
    return bool(_tables(database))


def load(database: Database, source: Path) -> Database:
    """Puts the tables of the archive into the schema STAGED, and returns the database with this search path; the caller
    closes it. All or nothing. Raises BackupError."""
    home = _schema(database)
    loaded = [table for schema, table in _listed(source) if schema == home]
    before = [
        f"DROP SCHEMA IF EXISTS {STAGED} CASCADE;",
        f"CREATE SCHEMA {STAGED};",
        f"CREATE SCHEMA {_ASIDE};",
        *(_move(table, home, _ASIDE) for table in sorted(_tables(database))),
    ]
    after = [
        *(_move(table, home, STAGED) for table in loaded),
        *(_move(table, _ASIDE, home) for table in sorted(_tables(database))),
        f"DROP SCHEMA {_ASIDE};",
    ]
    _play(database.url, source, before=before, after=after)
    options = f"{database.url.query.get('options', '')} -csearch_path={STAGED}".strip()
    return Database(database.url.update_query_dict({"options": options}).render_as_string(hide_password=False))


def swap(database: Database) -> None:
    """Puts the staged tables in the place of Shoal's tables: those of older and newer releases too, as far as they have
    these names."""
    home = _schema(database)
    with database.write() as tx:
        loaded = inspect(tx.connection).get_table_names(STAGED)
        old = {*inspect(tx.connection).get_table_names(home)} & {*metadata.tables, _VERSIONS}
        for table in sorted(old):
            tx.execute(text(f"DROP TABLE {_IDENTIFIERS.quote(home)}.{_IDENTIFIERS.quote(table)} CASCADE"))
        for table in loaded:
            tx.execute(text(_move(table, STAGED, home)))
        tx.execute(text(f"DROP SCHEMA {STAGED}"))


def discard(database: Database) -> None:
    """Removes what `load` has made."""
    with database.write() as tx:
        tx.execute(text(f"DROP SCHEMA IF EXISTS {STAGED} CASCADE"))


def _schema(database: Database) -> str:
    """The schema that has the tables of Shoal."""
    with database.read() as tx:
        return str(tx.execute(text("SELECT current_schema()")).scalar_one())


def _tables(database: Database) -> set[str]:
    with database.read() as tx:
        return {*inspect(tx.connection).get_table_names()} & {*metadata.tables, _VERSIONS}


def _move(table: str, source: str, target: str) -> str:
    """Moves a table with its indexes and the sequences of its columns."""
    quote = _IDENTIFIERS.quote
    return f"ALTER TABLE {quote(source)}.{quote(table)} SET SCHEMA {quote(target)};"


def _listed(source: Path) -> list[tuple[str, str]]:
    """Schema and name of each table in the archive: `215; 1259 16389 TABLE public jobs owner`."""
    lines = (line.split() for line in _run("pg_restore", "--list", str(source)).splitlines())
    return [(columns[4], columns[5]) for columns in lines if columns[3:4] == ["TABLE"] and columns[4:5] != ["DATA"]]


def _play(url: URL, source: Path, *, before: Sequence[str], after: Sequence[str]) -> None:
    """Runs psql in one transaction. Raises BackupError: nothing has changed."""
    dbname, environment = _connection(url)
    script = [_find("pg_restore"), "--file=-", *_DUMPED, str(source)]
    psql = [_find("psql"), dbname, "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--file=-"]
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as said:
        with (
            subprocess.Popen(script, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said) as archive,
            subprocess.Popen(
                psql, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=environment
            ) as session,
        ):
            assert archive.stdout is not None and session.stdin is not None
            try:
                session.stdin.write("\n".join(["BEGIN;", *before, ""]).encode())
                shutil.copyfileobj(archive.stdout, session.stdin)
                if archive.wait() == 0:
                    session.stdin.write("\n".join([*after, "COMMIT;", ""]).encode())
                session.stdin.close()
            except BrokenPipeError:
                pass  # psql has ended, and says why
            archive.stdout.close()
        for program, process, file in (("psql", session, errors), ("pg_restore", archive, said)):
            file.seek(0)
            if process.returncode != 0 and (message := " ".join(file.read().decode(errors="replace").split())):
                raise BackupError(f"{program} failed: {message}")
        if archive.returncode != 0 or session.returncode != 0:
            raise BackupError(f"{source} was not restored: psql or pg_restore ended without a word.")


def _connection(url: URL) -> tuple[str, dict[str, str]]:
    """The argument that names the database, and the environment with its password."""
    environment = dict(os.environ)
    if url.password is not None:
        environment["PGPASSWORD"] = str(url.password)
    bare = url.set(drivername="postgresql", password=None).render_as_string(hide_password=False)
    return f"--dbname={bare}", environment


def _run(program: str, *arguments: str, url: URL | None = None) -> str:
    path = _find(program)
    environment = dict(os.environ)
    if url is not None:
        dbname, environment = _connection(url)
        arguments = (dbname, *arguments)
    ran = subprocess.run([path, *arguments], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ran.returncode != 0:
        raise BackupError(f"{program} failed: {' '.join(ran.stderr.split())}")
    return ran.stdout


def _find(program: str) -> str:
    """Finds the program on the PATH; otherwise the newest installed one."""
    path_found = shutil.which(program)
    if path_found is not None:
        return path_found
    installed = [path for path in _INSTALLED.glob(f"*/bin/{program}") if path.parent.parent.name.isdecimal()]
    if not installed:
        raise BackupError(f"{program} is not installed: install the client programs of PostgreSQL.")
    return str(max(installed, key=lambda path: int(path.parent.parent.name)))
