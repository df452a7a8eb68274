"""`shoal model`: register, list, alias, get and remove, against a real server."""

from pathlib import Path
from typing import Any

import pytest

from kit.views import series_point
from shoal_service.views import CheckpointView, JobView
from shoal_workers.contract.marker import CheckpointName


@pytest.fixture
def job(service: Any, tmp_path: Path) -> JobView:
    """It has trained to step 20, and has checkpoints of the steps 10 and 20 that nothing has written."""
    job = service.add_job(name="acoustic")
    service.train(job)
    names = [CheckpointName(step, 1, 1) for step in (10, 20)]
    saved = tuple(
        CheckpointView(
            step=name.step, url=str(tmp_path / str(name)), state="committed", bytes=7000, attempt=1, generation=1
        )
        for name in names
    )
    point = series_point(20, at=1.0, loss=1.5, lr=1e-3, world_size=1)
    service.report(
        job,
        job.status,
        checkpoints=saved,
        series=(point.model_copy(update={"val_loss": 1.75, "metrics": {"wer": 0.25}}),),
    )
    return job


def test_checkpoints_are_registered_by_job_and_step_and_listed_with_their_aliases(
    shoal: Any, service: Any, job: JobView
) -> None:
    ran = shoal("model", "register", f"{job.id}@10", "--name", "speech", "--description", "first")
    assert ran.code == 0 and ran.out == f"speech@1: step 10 of job {job.id}\n"
    made = shoal("model", "register", "acoustic", "--name", "speech", "--json").json()
    assert (made["version"], made["step"]) == (2, 20), "the newest one, of a job by its name"
    assert made["metrics"] == {"loss": 1.5, "val_loss": 1.75, "wer": 0.25} and made["bytes"] == 7000
    ran = shoal("model", "alias", "speech", "prod", "2")
    assert ran.code == 0 and ran.out == "speech@prod is version 2\n"
    [second, first] = [line.split() for line in shoal("model", "list", "speech").out.splitlines()[1:]]
    assert second[:8] == ["default", "speech", "2", "prod", job.id, "20", "1.5000", "1.7500"]
    assert first[2] == "1" and first[3] == job.id
    assert [one["version"] for one in shoal("model", "list", "--json").json()] == [2, 1]
    assert shoal("model", "list", "other").out == "No model is registered.\n"
    assert shoal("model", "list", "--project", "other", "--json").json() == []


def test_an_alias_moves_and_is_deleted_and_what_is_not_there_is_named(shoal: Any, job: JobView) -> None:
    for step in (10, 20):
        assert shoal("model", "register", f"{job.id}@{step}", "--name", "speech").code == 0
    for version in ("1", "2"):
        assert shoal("model", "alias", "speech", "prod", version, "--json").json()["aliases"] == ["prod"]
    assert shoal("model", "get", "speech@1", "--json").json()["aliases"] == []
    assert shoal("model", "get", "speech@prod").out.splitlines()[1] == f"step 20 of job {job.id}"
    assert shoal("model", "get", "speech").out.startswith("speech@2: "), "the newest one"
    assert "--dtype needs --to" in shoal("model", "get", "speech", "--dtype", "bf16").err
    ran = shoal("model", "alias", "speech", "prod", "9")
    assert ran.code == 4 and "no model 'speech' with a version or alias '9'" in ran.err
    for wrong in (("prod",), ("prod", "1", "--delete")):
        ran = shoal("model", "alias", "speech", *wrong)
        assert ran.code != 0 and "an alias needs a version, or --delete" in ran.err
    assert shoal("model", "alias", "speech", "prod", "--delete").out == "the alias speech@prod is deleted\n"
    ran = shoal("model", "get", "speech@prod")
    assert ran.code == 4 and "'prod'" in ran.err
    ran = shoal("model", "alias", "speech", "prod", "--delete")
    assert ran.code == 4
