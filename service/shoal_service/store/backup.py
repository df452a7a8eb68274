"""Makes a backup of the database while servers write, checks one, and restores it while no server runs.

    SQLite       VACUUM INTO: one consistent file, while servers write          a file of SQLite
    PostgreSQL   pg_dump, pg_restore, psql: the client programs of the server   an archive of pg_dump

The file appears under its name once it is complete. A restored database gets a new epoch, so that whatever still acts
for the old one is refused. It is made beside the one that it replaces, and takes its place after every check. The
storage is never touched: checkpoints are not part of a backup.

The client programs of PostgreSQL: pg_dump, pg_restore and psql. The password is never in their arguments.

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
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, inspect, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL

from shoal_service.store import lease as leases
from shoal_service.store.database import NEWEST_SPEC, Database, code_archives, events, job_specs, jobs, lease, metadata
from shoal_service.store.errors import BackupError, StoreUnavailable
from shoal_service.store.migrate import migrate
from shoal_service.store.records import read_spec

_SQLITE_MAGIC = b"SQLite format 3\0"
_EPOCHS = 1_000_000
"""Added to the epoch of a restored database. The lease has not changed hands this often since the backup: supervisors
know the newest epoch and refuse older ones."""


@dataclass(frozen=True, slots=True)
class Restored:
    contents: Contents
    aside: Path | None = None
    """Where the database that was replaced is now."""


def back_up(url: str, target: Path) -> Contents:
    """Makes a backup. Raises BackupError; StoreUnavailable: the database does not answer."""
    if target.exists():
        raise BackupError(f"{target} exists. Choose another name, or delete it.")
    draft = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with closing(Database(url)) as database:
            contents = _write_backup(database, draft)
        draft.chmod(0o600)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.rename(target)
    except OSError as error:
        raise BackupError(f"{target} cannot be written: {error}") from error
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            draft.with_name(draft.name + suffix).unlink(missing_ok=True)
    return contents


def _write_backup(database: Database, draft: Path) -> Contents:
    if not database.is_sqlite:
        contents = check(database)
        dump(database.url, draft)
        return contents
    assert database.url.database is not None
    path = Path(database.url.database)
    if path.stat().st_size == 0:
        path.unlink()  # it was made just now
        raise BackupError(f"{path} does not exist: there is nothing to back up. See --state-dir.")
    _vacuum_into(path, draft)
    with closing(Database(f"sqlite:///{draft}")) as copy:
        return check(copy)


def restore(url: str, source: Path, *, replace: bool, now: float) -> Restored:
    """Restores a backup. The caller makes sure that no server of this machine uses the database. Raises BackupError;
    StoreUnavailable."""
    with closing(Database(url)) as database:
        if _is_sqlite(source) != database.is_sqlite:
            kinds = ("SQLite", "PostgreSQL") if database.is_sqlite else ("PostgreSQL", "SQLite")
            raise BackupError(f"database_url names {kinds[0]}, but {source} is a backup of {kinds[1]}.")
        if database.is_sqlite:
            assert database.url.database is not None
            return _restore_file(Path(database.url.database), source, replace=replace, now=now)
        return _restore_postgres(database, source, replace=replace, now=now)


def _restore_file(path: Path, source: Path, *, replace: bool, now: float) -> Restored:
    is_used = path.exists() and path.stat().st_size > 0
    if is_used and not replace:
        raise BackupError(f"{path} exists. --replace moves it aside and puts the backup in its place.")
    _require_whole(source)
    draft = path.with_name(f"{path.name}.restoring")
    draft.unlink(missing_ok=True)
    try:
        _vacuum_into(source, draft, mode="immutable=1")  # no process writes it, and its directory may be read-only
        contents = _prepare(Database(f"sqlite:///{draft}"))
        draft.chmod(0o600)
        aside = _move_aside(path, now) if is_used else None
        draft.rename(path)
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            draft.with_name(draft.name + suffix).unlink(missing_ok=True)
    return Restored(contents, aside)


def _restore_postgres(database: Database, source: Path, *, replace: bool, now: float) -> Restored:
    shown = database.url.render_as_string(hide_password=True)
    verify(source)
    if is_used(database):
        held = _lease_holder(database, now)
        if held:
            raise BackupError(f"{shown} is in use: the control plane {held} holds the lease. Stop it first.")
        if not replace:
            raise BackupError(f"{shown} has tables of Shoal. --replace drops them and restores the backup.")
    staged = load(database, source)
    try:
        contents = _prepare(staged)
    except BaseException:
        discard(database)
        raise
    swap(database)
    return Restored(contents)


def _prepare(database: Database) -> Contents:
    """Migrates the database to the newest schema, gives it a new epoch, and checks it. Closes the database."""
    with closing(database):
        migrate(database)
        with database.write() as tx:
            values = {"owner": "", "expires_at": 0.0, "epoch": lease.c.epoch + _EPOCHS}
            tx.execute(update(lease).values(values))
        return check(database)


def _lease_holder(database: Database, now: float) -> str:
    try:
        with database.read() as tx:
            held = leases.read(tx)
    except StoreUnavailable:
        return ""
    return held.owner if held is not None and held.expires_at > now else ""


def _is_sqlite(source: Path) -> bool:
    try:
        with source.open("rb") as file:
            head = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise BackupError(f"{source} cannot be read: {error}") from error
    if head != _SQLITE_MAGIC and not head.startswith(MAGIC):
        raise BackupError(f"{source} is not a backup: neither a file of SQLite nor an archive of pg_dump.")
    return head == _SQLITE_MAGIC


def _require_whole(source: Path) -> None:
    """Refuses a file that is cut short, because SQLite takes the missing end of a file for zeros.
    https://www.sqlite.org/fileformat.html#the_database_header"""
    with source.open("rb") as file:
        head = file.read(100)
    page_bytes, pages = int.from_bytes(head[16:18]), int.from_bytes(head[28:32])
    expected = (65536 if page_bytes == 1 else page_bytes) * pages
    if len(head) < 100 or source.stat().st_size < expected:
        raise BackupError(f"{source} has {source.stat().st_size} bytes of {expected}: it is cut off.")


def _vacuum_into(source: Path, target: Path, *, mode: str = "mode=ro") -> None:
    """Makes a consistent copy, without free pages; other processes may write meanwhile."""
    uri = f"{source.absolute().as_uri()}?{mode}"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=30)) as connection:
            connection.execute("VACUUM INTO ?", (str(target),))
    except sqlite3.Error as error:
        raise BackupError(f"{source} cannot be copied: {error}") from error


def _move_aside(path: Path, now: float) -> Path:
    """Moves the database aside with its write-ahead log, which may hold transactions."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    aside = path.with_name(f"{path.name}.replaced-{stamp}")
    for suffix in ("-wal", "-shm", ""):
        old = path.with_name(path.name + suffix)
        if old.exists():
            old.rename(aside.with_name(aside.name + suffix))
    return aside


_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Contents:
    """What a database holds."""

    schema: str
    """Revision of the migrations."""
    jobs: int
    events: int
    archives: int
    newest_at: float | None
    """When a job was changed last; None if there is no job."""
    unreadable: int
    """Number of jobs whose spec this release cannot read. It could not read them before the backup either."""


def check(database: Database) -> Contents:
    """Checks the database. Raises BackupError: it is damaged, or its tables contradict each other."""
    with database.read() as tx:
        if database.is_sqlite:
            problems = list(tx.execute(text("PRAGMA integrity_check(5)")).scalars())
            if problems != ["ok"]:
                raise BackupError(f"the database is damaged: {'; '.join(problems)}")
            broken = len(tx.execute(text("PRAGMA foreign_key_check")).all())
            if broken:
                raise BackupError(f"{broken} rows refer to jobs that do not exist")
        last = select(events.c.job_num, func.max(events.c.seq).label("seq")).group_by(events.c.job_num).subquery()
        behind = (
            select(jobs.c.id)
            .outerjoin(last, last.c.job_num == jobs.c.num)
            .where(func.coalesce(last.c.seq, 0) != jobs.c.event_seq)
        )
        _require_none(list(tx.execute(behind.limit(_SHOWN)).scalars()), "have other events than their rows say")
        lacking = select(jobs.c.id).outerjoin(job_specs, NEWEST_SPEC).where(job_specs.c.version.is_(None))
        _require_none(list(tx.execute(lacking.limit(_SHOWN)).scalars()), "have no spec")
        versions = tx.execute(select(jobs.c.num, jobs.c.spec_version)).all()
        return Contents(
            schema=tx.execute(text("SELECT version_num FROM alembic_version")).scalar_one(),
            jobs=len(versions),
            events=tx.execute(select(func.count()).select_from(events)).scalar_one(),
            archives=tx.execute(select(func.count()).select_from(code_archives)).scalar_one(),
            newest_at=tx.execute(select(func.max(jobs.c.updated_at))).scalar_one(),
            unreadable=sum(bool(read_spec(tx, row.num, row.spec_version).problem) for row in versions),
        )


def _require_none(job_ids: list[str], what: str) -> None:
    if job_ids:
        raise BackupError(f"jobs {what}: {', '.join(job_ids)}")


_NAME = "backed-up"


def mark_backup(state_dir: Path) -> None:
    """Notes the time of a backup. Does nothing if there is no state directory: a backup of PostgreSQL may be made on a
    machine without a server."""
    if state_dir.is_dir():
        (state_dir / _NAME).touch(mode=0o600)


def newest_backup_at(state_dir: Path) -> float | None:
    """Unix time of the newest backup; None if none was made with this directory."""
    try:
        return (state_dir / _NAME).stat().st_mtime
    except FileNotFoundError:
        return None


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
    if _VERSIONS not in {table for _, table in _list_archived(source)}:
        raise BackupError(f"{source} has no table {_VERSIONS}: it is not a backup of Shoal's database.")
    _run("pg_restore", f"--file={os.devnull}", str(source))


def is_used(database: Database) -> bool:
    """Return whether there are tables of Shoal."""
    return bool(_list_tables(database))


def load(database: Database, source: Path) -> Database:
    """Puts the tables of the archive into the schema STAGED, and returns the database with this search path; the caller
    closes it. All or nothing. Raises BackupError."""
    home = _find_schema(database)
    loaded = [table for schema, table in _list_archived(source) if schema == home]
    before = [
        f"DROP SCHEMA IF EXISTS {STAGED} CASCADE;",
        f"CREATE SCHEMA {STAGED};",
        f"CREATE SCHEMA {_ASIDE};",
        *(_move(table, home, _ASIDE) for table in sorted(_list_tables(database))),
    ]
    after = [
        *(_move(table, home, STAGED) for table in loaded),
        *(_move(table, _ASIDE, home) for table in sorted(_list_tables(database))),
        f"DROP SCHEMA {_ASIDE};",
    ]
    _run_psql(database.url, source, before=before, after=after)
    options = f"{database.url.query.get('options', '')} -csearch_path={STAGED}".strip()
    return Database(database.url.update_query_dict({"options": options}).render_as_string(hide_password=False))


def swap(database: Database) -> None:
    """Puts the staged tables in the place of Shoal's tables: those of older and newer releases too, as far as they have
    these names."""
    home = _find_schema(database)
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


def _find_schema(database: Database) -> str:
    """The schema that has the tables of Shoal."""
    with database.read() as tx:
        return str(tx.execute(text("SELECT current_schema()")).scalar_one())


def _list_tables(database: Database) -> set[str]:
    with database.read() as tx:
        return {*inspect(tx.connection).get_table_names()} & {*metadata.tables, _VERSIONS}


def _move(table: str, source: str, target: str) -> str:
    """Moves a table with its indexes and the sequences of its columns."""
    quote = _IDENTIFIERS.quote
    return f"ALTER TABLE {quote(source)}.{quote(table)} SET SCHEMA {quote(target)};"


def _list_archived(source: Path) -> list[tuple[str, str]]:
    """Schema and name of each table in the archive: `215; 1259 16389 TABLE public jobs owner`."""
    lines = (line.split() for line in _run("pg_restore", "--list", str(source)).splitlines())
    return [(columns[4], columns[5]) for columns in lines if columns[3:4] == ["TABLE"] and columns[4:5] != ["DATA"]]


def _run_psql(url: URL, source: Path, *, before: Sequence[str], after: Sequence[str]) -> None:
    """Runs psql in one transaction. Raises BackupError: nothing has changed."""
    dbname, environment = _split_url(url)
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
            with suppress(BrokenPipeError):  # psql has ended, and says why
                session.stdin.write("\n".join(["BEGIN;", *before, ""]).encode())
                shutil.copyfileobj(archive.stdout, session.stdin)
                if archive.wait() == 0:
                    session.stdin.write("\n".join([*after, "COMMIT;", ""]).encode())
                session.stdin.close()
            archive.stdout.close()
        for program, process, file in (("psql", session, errors), ("pg_restore", archive, said)):
            file.seek(0)
            if process.returncode != 0 and (message := " ".join(file.read().decode(errors="replace").split())):
                raise BackupError(f"{program} failed: {message}")
        if archive.returncode != 0 or session.returncode != 0:
            raise BackupError(f"{source} was not restored: psql or pg_restore ended without a word.")


def _split_url(url: URL) -> tuple[str, dict[str, str]]:
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
        dbname, environment = _split_url(url)
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
