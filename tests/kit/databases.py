"""Databases with the newest schema, as copies of one of each kind: a copy costs a fraction of all migrations."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.sql import SQL, Identifier

from kit.postgres import PostgresServer
from shoal_service.store import Store

_COLUMNS = """
    SELECT c.relname, a.attname, a.atttypid, a.attnotnull FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace AND a.attnum > 0 ORDER BY 1, a.attnum"""
_USED_SEQUENCES = "SELECT sequencename FROM pg_sequences WHERE schemaname = 'public' AND last_value IS NOT NULL"


class MigratedDatabases:
    """Makes the originals when they are first needed."""

    def __init__(self, directory: Path, postgres: Callable[[], PostgresServer]) -> None:
        """`postgres`: the session's server, which it starts; or skips the test."""
        self._file = directory / "migrated.db"
        self._postgres = postgres
        self._original = ""
        self._pristine: _Pristine | None = None
        self._unused: list[str] = []
        """Names of databases that are equal to the original one."""

    def sqlite(self, path: Path) -> str:
        """URL of a database without rows, in a new file."""
        if not self._file.exists():
            Store.open(f"sqlite:///{self._file}").close()
        shutil.copyfile(self._file, path)
        return f"sqlite:///{path}"

    @contextmanager
    def postgres(self) -> Iterator[str]:
        """The same on PostgreSQL. It is emptied afterwards, for the next test: to make one takes five times as long."""
        server = self._postgres()
        if not self._original:
            self._original = server.create_database()
            Store.open(server.url(self._original)).close()
            self._pristine = _Pristine(server.url(self._original))
        assert self._pristine is not None
        name = self._unused.pop() if self._unused else server.create_database(self._original)
        yield server.url(name)
        if self._pristine.restore(server.url(name)):
            self._unused.append(name)
        else:
            server.drop_database(name)


class _Pristine:
    """What a migrated database holds."""

    def __init__(self, url: str) -> None:
        with psycopg.connect(url) as connection:
            self._columns = connection.execute(_COLUMNS).fetchall()
            self._tables = sorted({str(table) for table, *_ in self._columns})
            self._rows = {
                table: connection.execute(SQL("SELECT * FROM {}").format(Identifier(table))).fetchall()
                for table in self._tables
            }

    def restore(self, url: str) -> bool:
        """False: the database has another schema now, or somebody still uses it."""
        with psycopg.connect(url) as connection:
            if connection.execute(_COLUMNS).fetchall() != self._columns:
                return False
            connection.execute("SET lock_timeout = '2s'")
            connection.execute("SET session_replication_role = replica")  # without the triggers of foreign keys
            delete = [SQL("DELETE FROM {}").format(Identifier(table)) for table in self._tables]
            try:
                connection.execute(SQL("; ").join(delete))
            except psycopg.errors.LockNotAvailable:
                return False
            for (sequence,) in connection.execute(_USED_SEQUENCES).fetchall():
                connection.execute(SQL("ALTER SEQUENCE {} RESTART").format(Identifier(sequence)))
            for table, rows in self._rows.items():
                for row in rows:
                    places = SQL(", ").join([SQL("%s")] * len(row))
                    connection.execute(SQL("INSERT INTO {} VALUES ({})").format(Identifier(table), places), row)
        return True
