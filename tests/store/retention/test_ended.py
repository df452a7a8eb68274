"""Parts of the history of ended jobs, and archives that no job names, are removed; curves stay."""

import hashlib
from collections.abc import Callable

from shoal_service.core.retention import Kind
from shoal_service.store import Store, archives, checkpoint_rows, histories, job_deletion
from shoal_service.store.job_deletion import BEGINNING
from shoal_workers.contract.marker import CheckpointName


def _remove(store: Store, job_id: str, kind: Kind) -> int:
    total = 0
    while removed := store.writing(job_deletion.remove_part)(job_id, kind, reason="it is old", before=total, now=500.0):
        total += removed
    return total


def _has(store: Store, job_id: str) -> frozenset[Kind]:
    found, _ = store.reading(job_deletion.ended_jobs)(before=1e9)
    return next(one.has for one in found if one.id == job_id)


def test_pages_name_what_each_ended_job_has(
    store: Store, ended: Callable[..., str], submit: Callable[..., str]
) -> None:
    ids = [ended(at=at, saved=(10, 20)) for at in (100.0, 300.0, 200.0)]
    submit()
    store.writing(checkpoint_rows.pin)(ids[0], CheckpointName(10, 1, 1), is_pinned=True, now=400.0)
    first, place = store.reading(job_deletion.ended_jobs)(before=250.0, limit=1)
    second, last = store.reading(job_deletion.ended_jobs)(before=250.0, after=place or BEGINNING, limit=1)
    assert [one.id for one in (*first, *second)] == [ids[0], ids[2]]
    assert last is not None and store.reading(job_deletion.ended_jobs)(before=250.0, after=last) == ([], None)
    [job] = first
    assert job.has == {Kind.LOGS, Kind.SERIES, Kind.EVENTS} and job.ended_at == 100.0
    assert job.committed == (CheckpointName(10, 1, 1), CheckpointName(20, 1, 1))
    assert job.kept == {CheckpointName(10, 1, 1)}


def test_a_job_that_another_one_goes_on_from_is_needed(
    store: Store, ended: Callable[..., str], submit: Callable[..., str]
) -> None:
    job_id = ended(saved=(10, 20))
    submit(continue_from={"job": job_id, "step": 10})
    [job], _ = store.reading(job_deletion.ended_jobs)(before=1e9)
    assert job.is_needed and job.kept == {CheckpointName(10, 1, 1)}


def test_what_was_removed_is_an_event_and_is_not_removed_again(store: Store, ended: Callable[..., str]) -> None:
    job_id, other = ended(), ended()
    num_events = len(store.reading(histories.read_events)(job_id))
    assert _remove(store, job_id, Kind.LOGS) > 20 and store.reading(histories.read_logs)(job_id) == []
    assert store.reading(histories.read_events)(job_id)[-1].data["what"] == "logs"
    assert _remove(store, job_id, Kind.EVENTS) == num_events
    left = store.reading(histories.read_events)(job_id)
    assert [(event.type, event.data["what"]) for event in left] == [("job.pruned", "logs"), ("job.pruned", "events")]
    assert [event.seq for event in left] == [num_events + 1, num_events + 2], "numbers are not used again"
    assert _has(store, job_id) == {Kind.SERIES}
    assert _remove(store, job_id, Kind.EVENTS) == _remove(store, job_id, Kind.LOGS) == 0
    assert store.reading(histories.read_events)(job_id) == left
    assert _has(store, other) == {Kind.LOGS, Kind.SERIES, Kind.EVENTS}


def test_the_curve_of_a_job_stays_when_its_single_steps_are_gone(store: Store, ended: Callable[..., str]) -> None:
    job_id = ended(steps=70)
    before = store.reading(histories.read_series)(job_id, max_points=9)
    assert _remove(store, job_id, Kind.SERIES) == 64, "the last six are in no roll-up"
    assert store.reading(histories.read_series)(job_id, max_points=9) == before
    assert [point.step for point in store.reading(histories.read_series)(job_id, max_points=1000)][:3] == [8, 16, 24]
    assert [point.loss for point in store.reading(histories.read_series)(job_id, max_points=1000)][:2] == [4.5, 12.5]
    assert store.reading(histories.read_series)(job_id, max_points=1000)[-1].step == 70
    assert Kind.SERIES not in _has(store, job_id)


def test_an_archive_goes_once_no_job_names_it_and_it_was_not_uploaded_again(
    store: Store, ended: Callable[..., str]
) -> None:
    digests = {}
    for name in ("used", "unused", "young", "renewed"):
        data = name.encode()
        digests[name] = hashlib.sha256(data).hexdigest()
        store.writing(archives.put)(archives.checked(digests[name], data), now=900.0 if name == "young" else 10.0)
    ended(code={"archive": digests["used"]})
    assert set(store.reading(archives.unused)(before=800.0)) == {digests["unused"], digests["renewed"]}
    store.writing(archives.put)(archives.checked(digests["renewed"], b"renewed"), now=850.0)
    assert [name for name in digests if store.writing(archives.remove)(digests[name], before=800.0)] == ["unused"]
    assert [name for name in digests if store.reading(archives.exists)(digests[name])] == ["used", "young", "renewed"]
