"""Brings a database to the newest schema: Alembic, in one transaction, under a lock. Called by `Store.open`.

Two processes may start on an empty database at the same time: the second one waits (SQLite: BEGIN IMMEDIATE;
PostgreSQL: an advisory lock of the transaction) and then finds nothing left to do. A database of a newer version of
Shoal is refused, never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
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

_ADVISORY_LOCK = 0x73686F616C  # "shoal"


def migrate(database: Database, revision: str = "head") -> None:
    """Brings the schema up to `revision`; tests of a migration stop before the newest.

    Raises:
        StoreUnavailable: the database cannot be reached, or a newer version of Shoal has migrated it.
    """
    try:
        with database.write() as tx:
            if not database.is_sqlite:
                tx.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
            found = MigrationContext.configure(tx.connection).get_current_heads()
            if revision == "head" and set(found) == set(_scripts().get_heads()):
                return
            _refuse_newer(found)
            config = _config()
            config.attributes["connection"] = tx.connection
            command.upgrade(config, revision)
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


def _refuse_newer(heads: Sequence[str]) -> None:
    known = {script.revision for script in _scripts().walk_revisions()}
    unknown = [head for head in heads if head not in known]
    if unknown:
        raise StoreUnavailable(
            f"The database has schema {', '.join(unknown)}, which this version of Shoal does not know: a newer "
            "version has opened it. Use that version, or another database (setting database_url)."
        )
