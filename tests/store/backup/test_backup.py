"""A database is backed up while it is written, and restored and checked, on SQLite and on a real PostgreSQL."""

import contextlib
import stat
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from shoal_service.store import Store, archives, backup, job_lists, submissions
from shoal_service.store.backup import back_up, restore
from shoal_service.store.database import Database
from shoal_service.store.errors import BackupError, StoreUnavailable
from shoal_service.store.histories import read_events
from shoal_workers.contract.checks.spec_errors import parse_spec

SPEC = parse_spec({"name": "fish", "stop": {"steps": 10}, "data": {"corpus": "python-stdlib"}})
NewUrl = Callable[[], str]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewUrl]:
    """Makes URLs of empty databases of one kind."""
    if request.param == "sqlite":
        yield lambda: f"sqlite:///{tmp_path}/{uuid.uuid4().hex}.db"
        return
    server: Any = request.getfixturevalue("postgres")
    with contextlib.ExitStack() as databases:
        yield lambda: databases.enter_context(server.database())


def _fill(url: str, jobs: int = 3) -> list[str]:
    store = Store.open(url)
    try:
        lease = store.acquire_lease("owner", ttl_s=10, now=100.0)
        assert lease is not None and lease.epoch == 1
        ids = [store.writing(submissions.create)(SPEC, idempotency_key=None, now=50.0)[0].id for _ in range(jobs)]
        store.writing(archives.put)(
            archives.check("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", b"test"), now=1.0
        )
        return ids
    finally:
        store.close()


def test_a_restored_database_has_every_job_and_a_new_epoch(new_url: NewUrl, tmp_path: Path) -> None:
    url, other = new_url(), new_url()
    ids = _fill(url)
    file = tmp_path / "shoal.backup"
    made = back_up(url, file)
    assert (made.jobs, made.archives) == (3, 1) and made.events >= 3
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and list(tmp_path.glob("*.partial*")) == []
    done = restore(other, file, replace=False, now=200.0)
    assert done.contents == made and done.aside is None
    restored, original = Store.open(other), Store.open(url)
    try:
        for job_id in ids:
            assert restored.get_job(job_id) == original.get_job(job_id)
            assert restored.reading(read_events)(job_id) == original.reading(read_events)(job_id)
        lease = restored.acquire_lease("next", ttl_s=10, now=101.0)
        assert lease is not None and lease.epoch > 1_000_000, "whoever acts for the old database is refused"
        new = restored.writing(submissions.create)(SPEC, idempotency_key=None, now=60.0)[0]
        assert [job.id for job in restored.reading(job_lists.page)().items] == [new.id, *reversed(ids)], "numbers go on"
    finally:
        restored.close()
        original.close()


@pytest.mark.slow
def test_a_backup_is_consistent_while_jobs_are_submitted(new_url: NewUrl, tmp_path: Path) -> None:
    url = new_url()
    store = Store.open(url)
    begun, stop = threading.Event(), threading.Event()

    def submit() -> None:
        while not stop.is_set():
            store.writing(submissions.create)(SPEC, idempotency_key=None, now=50.0)
            begun.set()

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        assert begun.wait(30)
        back_up(url, tmp_path / "live.backup")
    finally:
        stop.set()
        thread.join()
        store.close()
    done = restore(new_url(), tmp_path / "live.backup", replace=False, now=200.0)
    assert done.contents.jobs >= 1 and done.contents.events == done.contents.jobs


def test_a_database_that_exists_is_replaced_only_on_request(new_url: NewUrl, tmp_path: Path) -> None:
    url = new_url()
    _fill(url, jobs=1)
    file = tmp_path / "shoal.backup"
    back_up(url, file)
    with pytest.raises(BackupError, match=r"exists\. Choose another name"):
        back_up(url, file)
    ids = _fill_more(url)
    with pytest.raises(BackupError, match="--replace"):
        restore(url, file, replace=False, now=200.0)
    done = restore(url, file, replace=True, now=200.0)
    assert done.contents.jobs == 1
    if done.aside is not None:
        assert {job.id for job in _jobs(f"sqlite:///{done.aside}")} >= set(ids), "the one before is kept aside"
    assert len(_jobs(url)) == 1


def test_a_backup_of_an_older_schema_is_refused_and_replaces_nothing(new_url: NewUrl, tmp_path: Path) -> None:
    url, other = new_url(), new_url()
    _fill(other, jobs=1)
    Store.open(url).close()
    database = Database(url)
    with database.write() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '0015'"))
    database.close()
    assert back_up(url, tmp_path / "old.backup").schema == "0015"
    with pytest.raises(StoreUnavailable, match="schema 0015"):
        restore(other, tmp_path / "old.backup", replace=True, now=200.0)
    assert len(_jobs(other)) == 1


@pytest.mark.postgres
def test_a_database_whose_lease_is_held_is_not_replaced(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    file, server = tmp_path / "held.backup", request.getfixturevalue("postgres")
    with server.database() as url:
        _fill(url)
        back_up(url, file)
        with pytest.raises(BackupError, match=r"the control plane owner holds the lease\. Stop it first"):
            restore(url, file, replace=True, now=105.0)
    with pytest.raises(BackupError, match=r"database_url names SQLite, but .*held\.backup is a backup of PostgreSQL"):
        restore(f"sqlite:///{tmp_path}/x.db", file, replace=False, now=105.0)


_IN_ITS_ROWS = -300
"""A place in a backup; the rows follow the list of contents."""


def _contradict(url: str) -> None:
    database = Database(url)
    with database.write() as tx:
        tx.execute(text("DELETE FROM events WHERE job_num = 2"))
    database.close()


@pytest.mark.cells(4, 12)
@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize("damage", ["cut off", "nonsense", "a contradiction"])
def test_a_broken_backup_leaves_the_database_as_it_was(
    new_url: NewUrl, tmp_path: Path, damage: str, is_used: bool
) -> None:
    url, other, file = new_url(), new_url(), tmp_path / "shoal.backup"
    _fill(other)
    if damage == "a contradiction":
        _contradict(other)
        postgres_or_file = Database(other)
        if postgres_or_file.is_sqlite:
            file.write_bytes(Path(str(postgres_or_file.url.database)).read_bytes())
        else:
            backup.dump(postgres_or_file.url, file)
        postgres_or_file.close()
    else:
        back_up(other, file)
        file.write_bytes(file.read_bytes()[:_IN_ITS_ROWS] if damage == "cut off" else b"nonsense")
    _restore_in_vain(url, file, tmp_path, is_used=is_used)


@pytest.mark.postgres
@pytest.mark.parametrize("is_used", [True, False])
def test_flipped_bytes_leave_the_database_as_it_was(
    request: pytest.FixtureRequest, tmp_path: Path, is_used: bool
) -> None:
    """On PostgreSQL only: a file of SQLite has no checksums of its rows."""
    file, server = tmp_path / "shoal.backup", request.getfixturevalue("postgres")
    with server.database() as url, server.database() as other:
        _fill(other)
        back_up(other, file)
        whole = bytearray(file.read_bytes())
        whole[_IN_ITS_ROWS - 64 : _IN_ITS_ROWS] = bytes(255 - one for one in whole[_IN_ITS_ROWS - 64 : _IN_ITS_ROWS])
        file.write_bytes(whole)
        _restore_in_vain(url, file, tmp_path, is_used=is_used)


def _restore_in_vain(url: str, file: Path, tmp_path: Path, *, is_used: bool) -> None:
    """It is refused, and the database is as before."""
    before = _fill(url, jobs=2) if is_used else []
    with pytest.raises(BackupError):
        restore(url, file, replace=True, now=200.0)
    database = Database(url)
    assert is_used or database.is_sqlite or not backup.is_used(database)
    database.close()
    assert {job.id for job in _jobs(url)} == {*before}
    assert sorted(path.name for path in tmp_path.glob("*.restoring*")) == []


@pytest.mark.postgres
def test_what_other_programs_have_in_the_database_stays(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    file, server = tmp_path / "shoal.backup", request.getfixturevalue("postgres")
    with server.database() as url, server.database() as other:
        _fill(other)
        back_up(other, file)
        ids = _fill(url, jobs=1)
        database = Database(url)
        with database.write() as tx:
            tx.execute(text("CREATE TABLE others (a int)"))
        for _ in range(2):  # what an interrupted restore has left does no harm
            assert restore(url, file, replace=True, now=200.0).contents.jobs == 3
            with database.write() as tx:
                assert tx.execute(text("SELECT count(*) FROM others")).scalar_one() == 0
                schemas = text("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'shoal%'")
                assert list(tx.execute(schemas).scalars()) == []
                tx.execute(text("CREATE SCHEMA shoal_restored CREATE TABLE jobs (a int)"))
        database.close()
        assert not {job.id for job in _jobs(url)} & {*ids}


def test_a_backup_for_another_kind_of_database_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "shoal.backup"
    url = f"sqlite:///{tmp_path}/shoal.db"
    _fill(url)
    back_up(url, file)
    with pytest.raises(StoreUnavailable):
        restore("mysql://host/db", file, replace=True, now=200.0)
    file.write_bytes(b"nonsense")
    with pytest.raises(BackupError, match="neither a file of SQLite nor an archive of pg_dump"):
        restore(url, file, replace=True, now=200.0)


def _fill_more(url: str) -> list[str]:
    store = Store.open(url)
    try:
        return [store.writing(submissions.create)(SPEC, idempotency_key=None, now=70.0)[0].id for _ in range(2)]
    finally:
        store.close()


def _jobs(url: str) -> list[Any]:
    store = Store.open(url)
    try:
        return list(store.reading(job_lists.page)().items)
    finally:
        store.close()
