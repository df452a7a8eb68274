"""Files of jobs, deletions, retention and backups on the command line."""

import time
from pathlib import Path
from typing import Any

import pytest

from kit.worlds.kept_files import keep_files
from shoal_api.cli.session import ExitCode
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


def test_files_are_listed_and_fetched_with_their_paths(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job(name="writer")
    assert shoal("files", "writer").out == "The storage of the job has no such file.\n"
    root, out = tmp_path / "checkpoints" / job.id, tmp_path / "out"
    keep_files(root, 0, {"last.pt": b"0123", "runs/a/events": b"e" * 2048, "log.txt": b"of 0"}, num_left_out=3)
    keep_files(root, 1, {"log.txt": b"of 1"})
    ran = shoal("files", "writer")
    assert [line.split()[0] for line in ran.out.splitlines()[1:]] == [
        "last.pt",
        "log.txt",
        "node-1/log.txt",
        "runs/a/events",
    ]
    assert "3 files" in ran.err and "outputs.max_gib" in ran.err
    assert [one["name"] for one in shoal("files", job.id, "runs/**", "--json").json()["items"]] == ["runs/a/events"]

    ran = shoal("fetch", "writer", "**", "--out", str(out))
    assert (ran.code, ran.out) == (0, f"{out}: 4 files, 2.0 KiB\n"), ran
    written = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert written == {
        "last.pt": b"0123",
        "log.txt": b"of 0",
        "node-1/log.txt": b"of 1",
        "runs/a/events": b"e" * 2048,
    }
    (out / "last.pt").write_bytes(b"old")
    before = (out / "log.txt").stat().st_mtime_ns
    assert shoal("fetch", "writer", "*.*", "--out", str(out)).code == 0
    assert (out / "last.pt").read_bytes() == b"0123" and (out / "log.txt").stat().st_mtime_ns == before
    ran = shoal("fetch", "writer", "*.bin")
    assert ran.code == ExitCode.NOT_FOUND and "no file that matches '*.bin'" in ran.err


def test_a_link_in_the_way_leads_nowhere(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job(name="writer")
    keep_files(tmp_path / "checkpoints" / job.id, 0, {"runs/x": b"data", "y": b"data"})
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    (outside / "y").write_text("mine")
    (out / "runs").symlink_to(outside)
    (out / "y").symlink_to(outside / "y")
    ran = shoal("fetch", "writer", "runs/**", "--out", str(out))
    assert ran.code == ExitCode.USAGE and "outside of" in ran.err, ran
    assert shoal("fetch", "writer", "y", "--out", str(out)).code == 0
    assert (out / "y").read_bytes() == b"data" and (outside / "y").read_text() == "mine"
    assert [path.name for path in outside.iterdir()] == ["y"]
