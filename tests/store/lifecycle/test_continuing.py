"""Jobs that go on from another job's checkpoint, on both databases."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.desired import Desired
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.fleet_views import DeletionView
from shoal_service.store import (
    IdempotencyConflict,
    Store,
    checkpoint_rows,
    curves,
    driving,
    histories,
    job_deletion,
    submissions,
)
from shoal_service.store.errors import CheckpointKept
from shoal_service.store.job_deletion import BEGINNING, DeletionRequest
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.marker import CheckpointName

Submit = Callable[..., str]
Begin = Callable[..., Any]
FAILED = AttemptEnd(reason=EndReason.STORAGE_FAILED, message="gone", step=30)


def _checkpoint(step: int, root: str = "/c/job", state: CheckpointState = CheckpointState.COMMITTED) -> CheckpointView:
    return CheckpointView(
        step=step, url=f"{root}/{CheckpointName(step, 1, 1)}", state=state, attempt=1, generation=1, committed_at=1.0
    )


def _source(submit: Submit, begin: Begin, *steps: int, end: AttemptEnd | None = None) -> str:
    job_id = submit()
    begin(job_id).report(checkpoints=tuple(_checkpoint(step) for step in steps), end=end)
    return job_id


@pytest.mark.parametrize("end", [None, FAILED])
def test_a_new_job_goes_on_from_the_newest_checkpoint_or_from_the_one_asked_for(
    store: Store, submit: Submit, begin: Begin, end: AttemptEnd | None
) -> None:
    source = _source(submit, begin, 10, 20, 30, end=end)
    newest = store.get_job(submit(continue_from={"job": source}))
    older = store.get_job(submit(continue_from={"job": source, "step": 20}, optimizer={"lr": 1e-5}))

    assert newest.spec.continue_from is not None and older.spec.continue_from is not None
    assert (newest.spec.continue_from.step, older.spec.continue_from.step) == (30, 20)
    assert older.spec.continue_from.checkpoint == "step-000000000020-a1-g1"
    assert older.spec.continue_from.url == "/c/job/step-000000000020-a1-g1"
    assert (newest.status.step, older.status.step) == (30, 20)
    created = store.reading(histories.read_events)(older.id)[0]
    assert (created.data["from_job"], created.data["from_step"]) == (source, 20)
    assert created.message == f"job created as fish, goes on from {source} after step 20"


def test_what_the_service_sets_is_not_taken_from_the_user(store: Store, submit: Submit, begin: Begin) -> None:
    source = _source(submit, begin, 10)
    forged = {"job": source, "checkpoint": "step-000000000099-a1-g1", "url": "/etc"}
    origin = store.get_job(submit(continue_from=forged)).spec.continue_from
    assert origin is not None and origin.url == "/c/job/step-000000000010-a1-g1"


def test_a_repeated_request_finds_its_job_although_the_newest_checkpoint_is_another_one(
    store: Store, submit: Submit, begin: Begin
) -> None:
    source = submit()
    attempt = begin(source)
    attempt.report(checkpoints=(_checkpoint(10),))
    spec = parse_spec({"task": "a:B", "stop": {"steps": 99}, "continue_from": {"job": source}})
    first, _ = store.writing(submissions.create)(spec, idempotency_key="k", now=1.0)
    attempt.report(checkpoints=(_checkpoint(20),))
    again, created = store.writing(submissions.create)(spec, idempotency_key="k", now=2.0)
    assert (again.id, created) == (first.id, False)
    with pytest.raises(IdempotencyConflict):
        store.writing(submissions.create)(spec.model_copy(update={"name": "other"}), idempotency_key="k", now=3.0)


def test_a_checkpoint_is_kept_until_the_new_job_has_one_of_its_own(store: Store, submit: Submit, begin: Begin) -> None:
    source = submit()
    writer = begin(source)
    writer.report(checkpoints=(_checkpoint(10), _checkpoint(20)))
    new = submit(continue_from={"job": source, "step": 10})
    ten = CheckpointName(10, 1, 1)

    def pins() -> tuple[str, ...]:
        return next(row.pins for row in store.reading(driving.to_drive)() if row.id == source)

    assert pins() == (str(ten),), "retention of the running source keeps it"
    assert store.reading(checkpoint_rows.holders)(source) == {str(ten): [new]}
    with pytest.raises(CheckpointKept, match=f"job {new} goes on from it"):
        store.reading(checkpoint_rows.check_deletion)(source, ten)
    attempt = begin(new)
    attempt.report(checkpoints=(_checkpoint(15, "/c/new", CheckpointState.FAILED),))
    assert pins() == (str(ten),), "a save that failed is no checkpoint"
    attempt.report(checkpoints=(_checkpoint(15, "/c/new"),))
    assert pins() == ()
    assert store.reading(checkpoint_rows.check_deletion)(source, ten).step == 10


def test_a_job_that_ends_needs_nothing_any_more_and_again_when_it_is_retried(
    store: Store, submit: Submit, begin: Begin
) -> None:
    source = _source(submit, begin, 10)
    new = submit(continue_from={"job": source})
    store.writing(submissions.request)(new, Desired.CANCEL, now=5.0)
    assert store.reading(checkpoint_rows.holders)(source) == {}
    other = submit(continue_from={"job": source})
    begin(other).report(end=FAILED)
    assert store.reading(checkpoint_rows.holders)(source) == {}
    store.writing(submissions.retry)(other, now=6.0)
    assert list(store.reading(checkpoint_rows.holders)(source).values()) == [[other]]


def test_neither_the_deletion_of_a_job_nor_the_retention_of_ended_ones_takes_what_another_needs(
    store: Store, submit: Submit, begin: Begin
) -> None:
    source = _source(submit, begin, 10, 20, end=FAILED)
    new = submit(continue_from={"job": source, "step": 10})
    (ended,), _ = store.reading(job_deletion.find_ended_jobs)(before=1e9, after=BEGINNING, limit=10)
    assert ended.kept == {CheckpointName(10, 1, 1)}
    deletion = store.writing(job_deletion.begin)(source, DeletionRequest(root="/c/job"), now=50.0)
    assert deletion.kept == ("/c/job/step-000000000010-a1-g1",)
    assert store.get_job(new).status.step == 10
    with pytest.raises(SpecError, match="is being deleted"):
        submit(continue_from={"job": source, "step": 10})


def test_the_series_of_a_job_that_begins_at_a_later_step_has_every_step(
    store: Store, job_id: str, attempt: Any
) -> None:
    for steps in ((6, 7), (8, 9, 10, 11, 12, 13, 14), tuple(range(15, 26))):
        attempt.report(series=tuple(_point(step) for step in steps))
    assert [point.step for point in store.reading(histories.read_series)(job_id)] == list(range(6, 26))
    assert [point.step for point in store.reading(curves.read_curve)(job_id, after_step=-1, max_points=100)] == list(
        range(6, 26)
    )


def _point(step: int) -> SeriesPoint:
    numbers = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 1.0, "step_s": 0.1}
    return SeriesPoint(step=step, at=float(step), world_size=1, generation=1, val_loss=None, **numbers)


def _script(store: Store, **more: Any) -> str:
    spec = parse_spec({"script": {"file": "train.py"}, **more})
    return store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)[0].id


def test_a_script_goes_on_from_the_files_of_another_script(store: Store) -> None:
    here, there = _script(store), _script(store, checkpoint={"url": "/c/"})
    for source, url in ((here, None), (there, f"/c/{there}")):
        origin = store.get_job(_script(store, continue_from={"job": source})).spec.continue_from
        assert origin is not None and (origin.job, origin.url, origin.step) == (source, url, None)


def test_a_script_cannot_go_on_from_checkpoints_or_choose_a_step(store: Store, submit: Submit, begin: Begin) -> None:
    with pytest.raises(SpecError, match="is no script: its checkpoints are Shoal's, which a script cannot read"):
        _script(store, continue_from={"job": _source(submit, begin, 10)})
    with pytest.raises(SpecError, match=r"continue_from.step 10: a script decides itself which of its files it loads"):
        _script(store, continue_from={"job": _script(store), "step": 10})
    with pytest.raises(SpecError, match=r"continue_from\.job: "):
        _script(store, continue_from={"job": "job-none"})


def test_the_files_of_a_script_are_deleted_with_it_unless_another_one_needs_them(store: Store) -> None:
    def deleted(job_id: str) -> DeletionView:
        store.writing(submissions.request)(job_id, Desired.CANCEL, now=2.0)
        request = DeletionRequest(root=f"/c/{job_id}", with_checkpoints=True, by="ada")
        return store.writing(job_deletion.begin)(job_id, request, now=3.0)

    source = _script(store)
    holder = _script(store, continue_from={"job": source})
    view = deleted(source)
    assert (view.with_files, view.kept) == (False, (f"/c/{source}",))
    view = deleted(holder)
    assert (view.with_files, view.kept) == (True, ())


def test_a_loop_that_decides_its_end_itself_goes_on_from_a_checkpoint(
    store: Store, submit: Submit, begin: Begin
) -> None:
    source = _source(submit, begin, 10)
    spec = parse_spec({"loop": {"file": "train.py"}, "continue_from": {"job": source}})
    job, _ = store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)
    assert job.spec.continue_from is not None and job.spec.continue_from.step == 10
