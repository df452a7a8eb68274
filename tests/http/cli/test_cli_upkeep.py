"""`shoal delete` and `shoal gc`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
