"""`shoal delete`, `shoal gc`, `shoal backup` and `shoal restore`."""

import time
from pathlib import Path
from typing import Any

import pytest

from shoal_service.state_lock import StateLock
from shoal_service.store import Store, histories
from shoal_service.store.backup import newest_backup_at


def test_delete_asks_and_deletes_and_can_be_repeated(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job(name="gone")
    refused = shoal("delete", job.id, "--yes")
    assert refused.code == 2 and f"shoal cancel {job.id}" in refused.err
    shoal("cancel", job.id)
    asked = shoal("delete", job.id)
    assert asked.code == 2 and "add --yes" in asked.err
    done = shoal("delete", "gone", "--yes", "--keep-checkpoints")
    assert done.code == 0 and f"deleted, its files stay in {tmp_path}/checkpoints/{job.id}" in done.out
    assert shoal("delete", job.id, "--yes", "--json").json()["job_id"] == job.id
    assert shoal("show", job.id).code == 4


def test_gc_names_what_is_old_and_deletes_it(shoal: Any, service: Any) -> None:
    job = service.add_job()  # years ago, by the clock of these tests
    service.train(job)
    service.finish(job)
    dry = shoal("gc", "--dry-run")
    assert dry.code == 0 and f"logs       {job.id}  byte-lm" in dry.out and "retain_logs_days is 30" in dry.out
    assert shoal("logs", job.id).out, "a dry run deletes nothing"
    ran = shoal("gc")
    assert ran.code == 0 and "rows" in ran.out
    assert "nothing is old enough" in shoal("gc").out


def test_a_server_is_backed_up_while_it_runs_and_restored_elsewhere(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job()
    service.train(job)
    file, other = tmp_path / "monday.backup", tmp_path / "other"
    ran = shoal("backup", str(file), "--database-url", f"sqlite:///{tmp_path}/shoal.db")
    assert ran.code == 0 and "1 job" in ran.out
    assert newest_backup_at(tmp_path) is None, "without the directory of a server"
    ran = shoal("backup", str(tmp_path / "again"), "--state-dir", str(tmp_path))
    assert ran.code == 0 and newest_backup_at(tmp_path) == pytest.approx(time.time(), abs=60)
    with StateLock.take(other):
        refused = shoal("restore", str(file), "--state-dir", str(other))
        assert refused.code == 2 and "is in use by the server with pid" in refused.err
    ran = shoal("restore", str(file), "--state-dir", str(other), "--json")
    assert ran.json()["jobs"] == 1
    restored = Store.open(f"sqlite:///{other}/shoal.db")
    assert restored.reading(histories.read_events)(job.id) == service.store.reading(histories.read_events)(job.id)
    restored.close()
    refused = shoal("restore", str(file), "--state-dir", str(other))
    assert refused.code == 2 and "--replace moves it aside" in refused.err
    nothing = shoal("backup", str(tmp_path / "x"), "--state-dir", str(tmp_path / "nothing"))
    assert nothing.code == 2 and "nothing to back up" in nothing.err
