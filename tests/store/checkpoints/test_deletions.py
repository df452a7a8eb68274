"""What people delete, and what a verification finds, on both databases."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.endings import AttemptEnd
from shoal_service.store import Store, checkpoint_rows, histories
from shoal_service.store.errors import CheckpointConflict, CheckpointKept, CheckpointNotFound
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.marker import CheckpointName

Submit = Callable[..., str]
Begin = Callable[..., Any]
END = AttemptEnd(reason=EndReason.FINISHED, message="done", step=30)


def _name(step: int) -> CheckpointName:
    return CheckpointName(step, 1, 1)


def _checkpoint(step: int, state: CheckpointState = CheckpointState.COMMITTED, **more: Any) -> CheckpointView:
    return CheckpointView(step=step, url=f"/c/job/{_name(step)}", state=state, attempt=1, generation=1, **more)


def _states(store: Store, job_id: str) -> dict[int, CheckpointState]:
    return {one.step: one.state for one in store.reading(checkpoint_rows.read_checkpoints)(job_id)}


def test_an_older_one_can_be_deleted_and_its_row_stays(store: Store, job_id: str, attempt: Any) -> None:
    attempt.report(checkpoints=(_checkpoint(10, bytes=5), _checkpoint(20)))
    assert store.reading(checkpoint_rows.check_deletion)(job_id, _name(10)).bytes == 5
    for _ in range(2):
        gone = store.writing(checkpoint_rows.note_deletion)(job_id, _name(10), now=50.0)
        assert (gone.state, gone.bytes) == (CheckpointState.DELETED, 5)
    attempt.report(checkpoints=(_checkpoint(10, CheckpointState.DAMAGED, message="its marker is missing"),))
    assert _states(store, job_id) == {10: CheckpointState.DELETED, 20: CheckpointState.COMMITTED}
    types = [event.type for event in store.reading(histories.read_events)(job_id)]
    assert types.count("checkpoint.deleted") == 1
    with pytest.raises(CheckpointConflict, match="is deleted: only one that is in the storage can be deleted"):
        store.reading(checkpoint_rows.check_deletion)(job_id, _name(10))


def test_the_newest_of_a_job_that_has_not_ended_and_a_pinned_one_are_kept(
    store: Store, job_id: str, attempt: Any
) -> None:
    attempt.report(checkpoints=(_checkpoint(10),))
    with pytest.raises(CheckpointKept, match="it is the only one, and the job"):
        store.reading(checkpoint_rows.check_deletion)(job_id, _name(10))
    attempt.report(checkpoints=(_checkpoint(20), _checkpoint(30, CheckpointState.DAMAGED)))
    with pytest.raises(CheckpointKept, match="it is the newest one"):
        store.reading(checkpoint_rows.check_deletion)(job_id, _name(20))
    assert store.reading(checkpoint_rows.check_deletion)(job_id, _name(30)).step == 30, (
        "a damaged one is nothing to resume from"
    )
    store.writing(checkpoint_rows.pin)(job_id, _name(10), is_pinned=True, now=40.0)
    with pytest.raises(CheckpointKept, match=r"it is pinned; `shoal pin JOB 10 --undo`"):
        store.reading(checkpoint_rows.check_deletion)(job_id, _name(10))
    attempt.report(end=END)
    assert store.reading(checkpoint_rows.check_deletion)(job_id, _name(20)).step == 20
    with pytest.raises(CheckpointNotFound):
        store.reading(checkpoint_rows.check_deletion)(job_id, _name(99))


def test_the_status_of_an_ended_job_names_the_newest_that_is_left(store: Store, job_id: str, attempt: Any) -> None:
    attempt.report(checkpoints=(_checkpoint(10), _checkpoint(30)), status_checkpoint_step=30, end=END)
    assert store.get_job(job_id).status.checkpoint_step == 30
    store.writing(checkpoint_rows.note_deletion)(job_id, _name(30), now=50.0)
    assert store.get_job(job_id).status.checkpoint_step == 10
    store.writing(checkpoint_rows.note_deletion)(job_id, _name(10), now=51.0)
    assert store.get_job(job_id).status.checkpoint_step is None


def test_damage_that_a_verification_finds_is_kept(store: Store, begin: Begin, job_id: str) -> None:
    begin(job_id).report(checkpoints=(_checkpoint(10, bytes=5), _checkpoint(20, CheckpointState.DELETED)))
    for _ in range(2):
        store.writing(checkpoint_rows.note_damage)(job_id, _name(10), message="shard-00000.bin differs", now=50.0)
    store.writing(checkpoint_rows.note_damage)(job_id, _name(20), message="too late", now=50.0)
    found = store.reading(checkpoint_rows.read_checkpoints)(job_id)[0]
    assert (found.state, found.message, found.bytes) == (CheckpointState.DAMAGED, "shard-00000.bin differs", 5)
    assert _states(store, job_id)[20] is CheckpointState.DELETED
    assert [event.type for event in store.reading(histories.read_events)(job_id)].count("checkpoint.damaged") == 1
