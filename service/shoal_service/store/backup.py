"""Makes a backup of the database while servers write, checks one, and restores it while no server runs.

    SQLite       VACUUM INTO: one consistent file, while servers write          a file of SQLite
    PostgreSQL   pg_dump, pg_restore, psql: the client programs of the server   an archive of pg_dump

The file appears under its name once it is complete. A restored database gets a new epoch, so that whatever still acts
for the old one is refused. It is made beside the one that it replaces, and takes its place after every check. The
storage is never touched: checkpoints are not part of a backup.
"""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select, text, update

from shoal_service.store import backup_postgres
from shoal_service.store import lease as leases
from shoal_service.store.database import Database
from shoal_service.store.errors import BackupError, StoreUnavailable
from shoal_service.store.migrate import migrate
from shoal_service.store.records import read_spec
from shoal_service.store.tables import code_archives, events, job_specs, jobs, lease

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
    database = Database(url)
    draft = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        if not database.is_sqlite:
            contents = check(database)
            backup_postgres.dump(database.url, draft)
        else:
            assert database.url.database is not None
            path = Path(database.url.database)
            if path.stat().st_size == 0:
                path.unlink()  # it was made just now
                raise BackupError(f"{path} does not exist: there is nothing to back up. See --state-dir.")
            _vacuum_into(path, draft)
            contents = _check_file(draft)
        draft.chmod(0o600)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.rename(target)
    except OSError as error:
        raise BackupError(f"{target} cannot be written: {error}") from error
    finally:
        database.close()
        for suffix in ("", "-wal", "-shm", "-journal"):
            draft.with_name(draft.name + suffix).unlink(missing_ok=True)
    return contents


def restore(url: str, source: Path, *, replace: bool, now: float) -> Restored:
    """Restores a backup. The caller makes sure that no server of this machine uses the database. Raises BackupError;
    StoreUnavailable."""
    database = Database(url)
    try:
        if _is_sqlite(source) != database.is_sqlite:
            kinds = ("SQLite", "PostgreSQL") if database.is_sqlite else ("PostgreSQL", "SQLite")
            raise BackupError(f"database_url names {kinds[0]}, but {source} is a backup of {kinds[1]}.")
        if database.is_sqlite:
            assert database.url.database is not None
            return _restore_file(Path(database.url.database), source, replace=replace, now=now)
        return _restore_postgres(database, source, replace=replace, now=now)
    finally:
        database.close()


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
    backup_postgres.verify(source)
    if backup_postgres.is_used(database):
        held = _lease_holder(database, now)
        if held:
            raise BackupError(f"{shown} is in use: the control plane {held} holds the lease. Stop it first.")
        if not replace:
            raise BackupError(f"{shown} has tables of Shoal. --replace drops them and restores the backup.")
    staged = backup_postgres.load(database, source)
    try:
        contents = _prepare(staged)
    except BaseException:
        backup_postgres.discard(database)
        raise
    backup_postgres.swap(database)
    return Restored(contents)


def _prepare(database: Database) -> Contents:
    """Migrates the database to the newest schema, gives it a new epoch, and checks it. Closes the database."""
    try:
        migrate(database)
        with database.write() as tx:
            values = {"owner": "", "expires_at": 0.0, "epoch": lease.c.epoch + _EPOCHS}
            tx.execute(update(lease).values(values))
        return check(database)
    finally:
        database.close()


def _lease_holder(database: Database, now: float) -> str:
    try:
        with database.read() as tx:
            held = leases.current(tx)
    except StoreUnavailable:
        return ""
    return held.owner if held is not None and held.expires_at > now else ""


def _is_sqlite(source: Path) -> bool:
    try:
        with source.open("rb") as file:
            head = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise BackupError(f"{source} cannot be read: {error}") from error
    if head != _SQLITE_MAGIC and not head.startswith(backup_postgres.MAGIC):
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
    try:
        connection = sqlite3.connect(f"{source.absolute().as_uri()}?{mode}", uri=True, timeout=30)
        try:
            connection.execute("VACUUM INTO ?", (str(target),))
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise BackupError(f"{source} cannot be copied: {error}") from error


def _check_file(path: Path) -> Contents:
    database = Database(f"sqlite:///{path}")
    try:
        return check(database)
    finally:
        database.close()


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
        _none(list(tx.execute(behind.limit(_SHOWN)).scalars()), "have other events than their rows say")
        spec = (job_specs.c.job_num == jobs.c.num) & (job_specs.c.version == jobs.c.spec_version)
        lacking = select(jobs.c.id).outerjoin(job_specs, spec).where(job_specs.c.version.is_(None))
        _none(list(tx.execute(lacking.limit(_SHOWN)).scalars()), "have no spec")
        versions = tx.execute(select(jobs.c.num, jobs.c.spec_version)).all()
        return Contents(
            schema=tx.execute(text("SELECT version_num FROM alembic_version")).scalar_one(),
            jobs=len(versions),
            events=tx.execute(select(func.count()).select_from(events)).scalar_one(),
            archives=tx.execute(select(func.count()).select_from(code_archives)).scalar_one(),
            newest_at=tx.execute(select(func.max(jobs.c.updated_at))).scalar_one(),
            unreadable=sum(bool(read_spec(tx, row.num, row.spec_version).problem) for row in versions),
        )


def _none(job_ids: list[str], what: str) -> None:
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
