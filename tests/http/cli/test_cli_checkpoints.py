"""`shoal verify` and `shoal delete-checkpoint` on a real directory."""

import zlib
from pathlib import Path
from typing import Any

import pytest

from shoal_api.cli.commands.artifacts import find_checkpoint
from shoal_api.cli.session import CliError, Session
from shoal_service.supervisor.checkpoints import CheckpointCatalog
from shoal_service.views import CheckpointView, JobStatus
from shoal_workers.contract.job import JobState
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.validation import Score, Standing
from shoal_workers.contract.worker_reports import SavedFile, SavedPart

CONTENT = b"weights" * 1000


def _saved(service: Any, job: Any, directory: Path, *steps: int) -> Path:
    """A job that runs, with committed checkpoints; its directory."""
    root = directory / "checkpoints" / job.id
    views = []
    for step in steps:
        name = CheckpointName(step, 1, 1)
        (root / str(name)).mkdir(parents=True)
        (root / str(name) / "shard-00000.bin").write_bytes(CONTENT)
        file = SavedFile(name="shard-00000.bin", bytes=len(CONTENT), crc32=zlib.crc32(CONTENT))
        fields = {"generation": 1, "step": step, "rank": 0, "world_size": 1, "stall_s": 0.0, "write_s": 0.0}
        part = SavedPart(directory=str(root / str(name)), files=(file,), **fields)
        CheckpointCatalog(str(root)).commit([part], job_id=job.id, attempt=1, now=1.0)
        url = str(root / str(name))
        views.append(CheckpointView(step=step, url=url, state="committed", bytes=7000, attempt=1, generation=1))
    service.begin(job)
    service.report(job, JobStatus(state=JobState.RUNNING), checkpoints=tuple(views))
    return root


def test_a_whole_checkpoint_is_said_to_be_whole_and_a_damaged_one_what_differs(
    shoal: Any, service: Any, tmp_path: Path
) -> None:
    job = service.add_job()
    root = _saved(service, job, tmp_path, 10, 20)
    ran = shoal("verify", job.id, "10")
    assert ran.code == 0 and "step-000000000010-a1-g1: whole, 6.8 KiB read" in ran.out
    (root / "step-000000000010-a1-g1" / "shard-00000.bin").write_bytes(CONTENT[::-1])
    ran = shoal("verify", job.id, "10")
    assert ran.code != 0 and "is damaged: " in ran.err and "shard-00000.bin has crc32" in ran.err
    assert shoal("verify", job.id, "11").err.count("no committed or damaged checkpoint of step 11") == 1


def test_a_deletion_needs_a_yes_and_what_the_job_needs_is_refused(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job()
    root = _saved(service, job, tmp_path, 10, 20)
    ran = shoal("delete-checkpoint", job.id, "10")
    assert ran.code != 0 and "--yes" in ran.err and len(list(root.iterdir())) == 2
    ran = shoal("delete-checkpoint", job.id, "20", "--yes")
    assert ran.code != 0 and "it is the newest one" in ran.err and len(list(root.iterdir())) == 2
    assert shoal("delete-checkpoint", job.id, "10", "--yes", "--json").json()["state"] == "deleted"
    assert [path.name for path in root.iterdir()] == ["step-000000000020-a1-g1"]


def test_export_takes_the_best_checkpoint_by_validation(service: Any, session: Session, tmp_path: Path) -> None:
    job = service.add_job(checkpoint={"keep_best": 2}, validation={"every_steps": 10})
    _saved(service, job, tmp_path, 10, 20, 30)
    with pytest.raises(CliError, match="no committed checkpoint of its best validation"):
        find_checkpoint(session, job.id, "best")
    best = Standing(keep=2, best=(Score(step=20, value=1.5), Score(step=30, value=1.75)))
    service.report(job, JobStatus(state=JobState.RUNNING, attempt=1, step=30, best=best))
    assert find_checkpoint(session, job.id, "best").endswith("/" + str(CheckpointName(20, 1, 1)))
    assert find_checkpoint(session, job.id, None).endswith("/" + str(CheckpointName(30, 1, 1))), "the newest"
    assert find_checkpoint(session, job.id, "10").endswith("/" + str(CheckpointName(10, 1, 1)))
    for step in ("best", "first"):
        with pytest.raises(CliError):
            find_checkpoint(session, str(tmp_path) if step == "best" else job.id, step)
