"""pg_dump and pg_restore: finds the programs, and runs them without the password in their arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from sqlalchemy import inspect
from sqlalchemy.engine import URL
from sqlalchemy.schema import DropTable, Table

from shoal_service.store.backup.errors import BackupError
from shoal_service.store.database import Database
from shoal_service.store.tables import metadata

MAGIC = b"PGDMP"
_VERSIONS = "alembic_version"
_INSTALLED = Path("/usr/lib/postgresql")


def dump(url: URL, target: Path) -> None:
    """One consistent snapshot, while others write. Raises BackupError."""
    _run("pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={target}", url=url)
    verify(target)


def verify(source: Path) -> None:
    """Raises BackupError: the archive's list of contents cannot be read, or it is not of Shoal."""
    listed = _run("pg_restore", "--list", str(source))
    if f" {_VERSIONS} " not in listed:
        raise BackupError(f"{source} has no table {_VERSIONS}: it is not a backup of Shoal's database.")


def load(url: URL, source: Path) -> None:
    """All or nothing. Raises BackupError."""
    options = ("--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges")
    _run("pg_restore", *options, str(source), url=url)


def is_used(database: Database) -> bool:
    """Whether there are tables of Shoal."""
    return bool(_tables(database))


def drop(database: Database) -> None:
    """Shoal's tables, those of older and newer releases too as far as they have these names."""
    found = _tables(database)
    with database.write() as tx:
        for table in reversed(metadata.sorted_tables):
            if table.name in found:
                tx.execute(DropTable(table))
        if _VERSIONS in found:
            tx.execute(DropTable(Table(_VERSIONS, metadata.__class__())))


def _tables(database: Database) -> set[str]:
    with database.read() as tx:
        return {*inspect(tx).get_table_names()} & {*metadata.tables, _VERSIONS}


def _run(program: str, *arguments: str, url: URL | None = None) -> str:
    path = _find(program)
    environment = dict(os.environ)
    if url is not None:
        if url.password is not None:
            environment["PGPASSWORD"] = str(url.password)
        bare = url.set(drivername="postgresql", password=None).render_as_string(hide_password=False)
        arguments = (f"--dbname={bare}", *arguments)
    ran = subprocess.run([path, *arguments], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ran.returncode != 0:
        raise BackupError(f"{program} failed: {' '.join(ran.stderr.split())}")
    return ran.stdout


def _find(program: str) -> str:
    """On the PATH; else the newest installed one."""
    found = shutil.which(program)
    if found is not None:
        return found
    installed = [path for path in _INSTALLED.glob(f"*/bin/{program}") if path.parent.parent.name.isdecimal()]
    if not installed:
        raise BackupError(f"{program} is not installed: install the client programs of PostgreSQL.")
    return str(max(installed, key=lambda path: int(path.parent.parent.name)))
