"""The registry of models and the lineage of checkpoints, on both databases."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.artifact_views import ModelRequest
from shoal_service.core.endings import AttemptEnd
from shoal_service.store import Store, checkpoint_rows, driving, job_deletion, models
from shoal_service.store.errors import CheckpointKept, ModelNotFound
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract.job import EndReason, JobState
from shoal_workers.contract.marker import CheckpointName

Submit = Callable[..., str]
Begin = Callable[..., Any]


def _checkpoint(step: int, state: CheckpointState = CheckpointState.COMMITTED) -> CheckpointView:
    name = CheckpointName(step, 1, 1)
    return CheckpointView(step=step, url=f"/checkpoints/job/{name}", state=state, attempt=1, generation=1)


def _register(store: Store, job_id: str, step: int | None = None, name: str = "speech") -> Any:
    request = ModelRequest(job=job_id, step=step)
    return store.writing(models.register)(name, request, data="d1", by="ann", now=50.0)


def test_versions_count_up_and_an_alias_moves(store: Store, begin: Begin, job_id: str) -> None:
    begin(job_id).report(checkpoints=(_checkpoint(10), _checkpoint(20)))
    first, second = _register(store, job_id, 10), _register(store, job_id)
    assert [(one.version, one.step, one.registered_by) for one in (first, second)] == [(1, 10, "ann"), (2, 20, "ann")]
    assert _register(store, job_id, 10) == first, "a repeated registration is the same version"
    assert (first.lineage[0].job_id, first.lineage[0].data, first.lineage[0].parent) == (job_id, "d1", None)
    assert len(first.lineage[0].spec_sha256) == 64
    for version in (1, 2):
        store.writing(models.set_alias)("default", "speech", "prod", version)
    found = store.reading(models.find)("default", "speech", "prod")
    assert (found.version, found.aliases) == (2, ("prod",))
    assert store.reading(models.find)("default", "speech", "1").aliases == ()
    assert store.reading(models.find)("default", "speech", "latest").version == 2
    assert [one.version for one in store.reading(models.versions)()] == [2, 1]
    assert store.reading(models.versions)(visible=("other",)) == []
    with pytest.raises(ModelNotFound, match="no model 'speech' with a version or alias 'staging'"):
        store.reading(models.find)("default", "speech", "staging")
    with pytest.raises(ModelNotFound):
        store.writing(models.set_alias)("default", "speech", "prod", 3)


def test_nothing_deletes_a_registered_checkpoint(store: Store, begin: Begin, job_id: str) -> None:
    begin(job_id).report(checkpoints=(_checkpoint(10), _checkpoint(20), _checkpoint(30)))
    _register(store, job_id, 10)
    [row] = store.reading(driving.to_drive)()
    assert row.pins == ("step-000000000010-a1-g1",), "the supervisor of the running job keeps it"
    with pytest.raises(CheckpointKept, match="it is the model speech@1"):
        store.reading(checkpoint_rows.check_deletion)(job_id, CheckpointName(10, 1, 1))
    store.reading(checkpoint_rows.check_deletion)(job_id, CheckpointName(20, 1, 1))
    store.writing(models.remove)("default", "speech", 1)
    store.reading(checkpoint_rows.check_deletion)(job_id, CheckpointName(10, 1, 1))
    assert _register(store, job_id, 20).version == 2, "the number of a removed version is not given again"


def test_a_registered_checkpoint_and_its_lineage_outlive_the_job(store: Store, job_id: str, attempt: Any) -> None:
    attempt.report(checkpoints=(_checkpoint(10),))
    _register(store, job_id, 10)
    attempt.report(JobState.SUCCEEDED, end=AttemptEnd(reason=EndReason.FINISHED, step=10, message=""))
    request = job_deletion.DeletionRequest(root="/checkpoints/job", by="ann")
    kept = store.writing(job_deletion.begin)(job_id, request, now=60.0).kept
    assert kept == ("/checkpoints/job/step-000000000010-a1-g1",)
    while store.writing(job_deletion.remove_rows)(job_id):
        pass
    store.writing(job_deletion.finish)(job_id, now=61.0)
    assert store.reading(models.find)("default", "speech", "1").lineage[0].job_id == job_id


def test_lineage_follows_what_a_job_goes_on_from(store: Store, submit: Submit, begin: Begin) -> None:
    parent = submit()
    begin(parent).report(checkpoints=(_checkpoint(10),))
    origin = {"job": parent, "step": 10, "checkpoint": str(CheckpointName(10, 1, 1)), "url": "/checkpoints/job/x"}
    child = submit(continue_from=origin)
    found = store.reading(models.lineage)(child)
    assert [one.job_id for one in found.jobs] == [child, parent] and found.is_whole
    assert found.jobs[0].parent is not None and found.jobs[0].parent.step == 10
    hidden = store.reading(models.lineage)(child, ("other",))
    assert [(one.job_id, one.is_known) for one in hidden.jobs] == [(child, True), (parent, False)]
    weights = store.reading(models.lineage)(submit(init_from="/weights")).jobs[0].parent
    assert weights is not None and (weights.job_id, weights.url) == ("", "/weights")
