"""Pins of checkpoints, on both databases."""

from typing import Any

from shoal_service.store import Store, checkpoint_rows, driving, histories
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract.marker import CheckpointName


def _checkpoint(step: int, state: CheckpointState = CheckpointState.COMMITTED) -> CheckpointView:
    name = CheckpointName(step, 1, 1)
    return CheckpointView(step=step, url=f"/checkpoints/job/{name}", state=state, attempt=1, generation=1)


def _pinned(store: Store, job_id: str) -> list[int]:
    checkpoints = store.reading(checkpoint_rows.read_checkpoints)(job_id)
    newest = store.reading(checkpoint_rows.read_checkpoints)(job_id, newest=2)
    assert newest == checkpoints[-2:], "page and list agree"
    return [checkpoint.step for checkpoint in checkpoints if checkpoint.pinned]


def test_pins_are_kept_with_the_job_and_passed_to_its_attempt(store: Store, job_id: str, attempt: Any) -> None:
    attempt.report(checkpoints=(_checkpoint(10), _checkpoint(20), _checkpoint(30)))
    pinned = store.writing(checkpoint_rows.pin)(job_id, CheckpointName(20, 1, 1), is_pinned=True, now=50.0)
    assert (pinned.step, pinned.pinned, pinned.name) == (20, True, "step-000000000020-a1-g1")
    store.writing(checkpoint_rows.pin)(job_id, CheckpointName(10, 1, 1), is_pinned=True, now=51.0)
    store.writing(checkpoint_rows.pin)(job_id, CheckpointName(10, 1, 1), is_pinned=True, now=52.0)
    assert _pinned(store, job_id) == [10, 20]
    [row] = store.reading(driving.to_drive)()
    assert row.pins == ("step-000000000010-a1-g1", "step-000000000020-a1-g1")
    attempt.report(checkpoints=(_checkpoint(10),))
    assert _pinned(store, job_id) == [10, 20], "a report about a checkpoint does not take its pin away"
    store.writing(checkpoint_rows.pin)(job_id, CheckpointName(20, 1, 1), is_pinned=False, now=53.0)
    assert _pinned(store, job_id) == [10]
    types = [event.type for event in store.reading(histories.read_events)(job_id) if event.type.endswith("pinned")]
    assert types == ["checkpoint.pinned", "checkpoint.pinned", "checkpoint.unpinned"], "a repeated pin is none"
