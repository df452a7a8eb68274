"""Databases with the newest schema, as copies of one of each kind: a copy costs a fraction of all migrations."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.postgres import PostgresServer
from shoal_service.store import Store


class MigratedDatabases:
    """Makes the originals when they are first needed."""

    def __init__(self, directory: Path, postgres: Callable[[], PostgresServer]) -> None:
        """`postgres`: the session's server, which it starts; or skips the test."""
        self._file = directory / "migrated.db"
        self._postgres = postgres
        self._original = ""

    def sqlite(self, path: Path) -> str:
        """URL of a database without rows, in a new file."""
        if not self._file.exists():
            Store.open(f"sqlite:///{self._file}").close()
        shutil.copyfile(self._file, path)
        return f"sqlite:///{path}"

    @contextmanager
    def postgres(self) -> Iterator[str]:
        """The same on PostgreSQL; it is dropped afterwards."""
        server = self._postgres()
        if not self._original:
            self._original = server.create_database()
            Store.open(server.url(self._original)).close()
        with server.database(template=self._original) as url:
            yield url
