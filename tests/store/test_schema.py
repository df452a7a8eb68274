import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from shoal_service.store import Store, StoreUnavailable, submissions
from shoal_service.store.database import Database, metadata
from shoal_service.store.migrate import migrate
from shoal_workers.contract.spec import JobSpec


def test_the_migrations_make_exactly_the_tables(empty_url: str) -> None:
    database = Database(empty_url)
    migrate(database)
    with database.read() as tx:
        context = MigrationContext.configure(
            tx.connection, opts={"compare_type": True, "compare_server_default": not database.is_sqlite}
        )
        assert compare_metadata(context, metadata) == []
    database.close()


def test_opening_a_database_again_keeps_its_rows(empty_url: str, spec: JobSpec) -> None:
    first = Store.open(empty_url)
    job, _ = first.writing(submissions.create)(spec, idempotency_key=None, now=1.0)
    first.close()
    second = Store.open(empty_url)
    assert second.get_job(job.id) == job
    second.close()


@pytest.mark.parametrize(
    ("revision", "message"),
    [
        ("9999", r"schema 9999, and Shoal [\d.]+ knows schemas up to 00\d\d: a newer release has opened it"),
        ("0031", r"schema 0031, and Shoal [\d.]+ upgrades schemas from 0032 on\. Keep .* start with a new database"),
    ],
    ids=["newer", "older"],
)
def test_a_database_with_a_schema_of_another_release_is_refused_unchanged(
    empty_url: str, revision: str, message: str
) -> None:
    Store.open(empty_url).close()
    database = Database(empty_url)
    with database.write() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    with pytest.raises(StoreUnavailable, match=message):
        Store.open(empty_url)
    with database.read() as tx:
        assert tx.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == revision
    database.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "is not a database URL"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("mysql://localhost/db", "names 'mysql'"),
        ("postgresql://nobody:secret@127.0.0.1:1/db", "refused"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_without_its_password(url: str, message: str) -> None:
    with pytest.raises(StoreUnavailable, match=message) as error:
        Store.open(url)
    assert "secret" not in str(error.value)


def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shoal.db"
    path.write_bytes(b"this is no database, but it is long enough to be read as one" * 20)
    with pytest.raises(StoreUnavailable, match="not a database"):
        Store.open(f"sqlite:///{path}")


def test_sqlite_runs_with_write_ahead_log_and_foreign_keys(tmp_path: Path) -> None:
    path = tmp_path / "new" / "directory" / "shoal.db"
    store = Store.open(f"sqlite:///{path}")
    store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database = Database(f"sqlite:///{path}")
    with database.read() as read:
        assert read.execute(text("PRAGMA foreign_keys")).scalar_one() == 1
        assert read.execute(text("PRAGMA synchronous")).scalar_one() == 1
    database.close()
    connection.close()


@pytest.mark.parametrize("existed", [False, True])
def test_the_files_of_sqlite_are_those_of_their_owner_alone(tmp_path: Path, existed: bool) -> None:
    path = tmp_path / "shoal.db"
    if existed:
        sqlite3.connect(path).close()
        path.touch(mode=0o644)
        path.chmod(0o644)
    store = Store.open(f"sqlite:///{path}")
    try:
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
        assert modes == {"shoal.db": 0o600, "shoal.db-wal": 0o600, "shoal.db-shm": 0o600}
    finally:
        store.close()
