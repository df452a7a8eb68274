"""Brings a database to the newest schema: Alembic, in one transaction, under a lock. Called by `Store.open`.

Two processes may start on an empty database at the same time: the second one waits (SQLite: BEGIN IMMEDIATE;
PostgreSQL: an advisory lock of the transaction) and then finds nothing left to do. A database whose schema is newer
than the last migration, or older than the first one, is refused and never changed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from shoal_service.store.database import Database
from shoal_service.store.errors import StoreUnavailable
from shoal_workers.version import VERSION

_ADVISORY_LOCK = 0x73686F616C  # "shoal"


def migrate(database: Database) -> None:
    """Brings the schema up to the newest migration.

    Raises:
        StoreUnavailable: the database cannot be reached, or its schema is newer or too old.
    """
    try:
        with database.write() as tx:
            if not database.is_sqlite:
                tx.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
            current = MigrationContext.configure(tx.connection).get_current_revision()
            if current == _scripts().get_current_head():
                return
            _refuse_unknown(current)
            config = _config()
            config.attributes["connection"] = tx.connection
            command.upgrade(config, "head")
    except (SQLAlchemyError, StoreUnavailable) as error:
        shown = database.url.render_as_string(hide_password=True)
        raise StoreUnavailable(f"database_url {shown}: {getattr(error, 'orig', None) or error}") from error


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@cache
def _scripts() -> ScriptDirectory:
    """The migrations. Read once in a process, because every migration is imported."""
    return ScriptDirectory.from_config(_config())


def _refuse_unknown(current: str | None) -> None:
    """Raises StoreUnavailable if no migration starts from this schema. `current`: None if the database is empty."""
    revisions = [script.revision for script in _scripts().walk_revisions()]
    if current is None or current in revisions:
        return
    if current > revisions[0]:
        raise StoreUnavailable(
            f"The database has schema {current}, and Shoal {VERSION} knows schemas up to {revisions[0]}: a newer "
            "release has opened it. Use that release, or another database (setting database_url)."
        )
    raise StoreUnavailable(
        f"The database has schema {current}, and Shoal {VERSION} upgrades schemas from {revisions[-1]} on. Keep the "
        "release that made it, or start with a new database (setting database_url). Checkpoints are not in the "
        "database: `shoal export DIRECTORY OUT` writes the weights of one, and init_from in a spec starts with them."
    )
