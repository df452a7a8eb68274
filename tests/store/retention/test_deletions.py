"""Deletions in steps, and what ages away: history, archives and records of the audit, on both databases."""

import asyncio
import contextvars
import hashlib
from collections.abc import Callable

import pytest
from sqlalchemy import func, select

from shoal_service.clock import SystemClock
from shoal_service.control.job_storage import JobStorage
from shoal_service.control.retention import RetentionCollector, RetentionConfig
from shoal_service.core.desired import Desired
from shoal_service.core.retention import Kind, RetentionRules
from shoal_service.problems import SettingsError
from shoal_service.settings import load_settings
from shoal_service.store import Store, access, archives, checkpoint_rows, curves, histories, job_deletion, submissions
from shoal_service.store.access import AuditEntry, AuditQuery
from shoal_service.store.database import metadata
from shoal_service.store.errors import JobNotFound, RequestConflict
from shoal_service.store.job_deletion import BEGINNING, DeletionRequest
from shoal_service.telemetry.tallies import Count
from shoal_workers.contract.job import JobState
from shoal_workers.contract.marker import CheckpointName

REQUEST = DeletionRequest(root="/data/job", by="somebody")


def _counts(store: Store) -> dict[str, int]:
    with store._database.read() as tx:
        return {
            table.name: tx.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
            if "job_num" in table.c or table.name == "jobs"
        }


def test_a_job_is_deleted_with_every_row_and_others_keep_theirs(store: Store, ended: Callable[..., str]) -> None:
    other = ended()
    before = _counts(store)
    job_id = ended()
    view = store.writing(job_deletion.begin)(job_id, REQUEST, now=200.0)
    assert (view.name, view.requested_by, view.finished_at, view.kept) == ("fish", "somebody", None, ())
    total = 0
    while removed := store.writing(job_deletion.remove_rows)(job_id):
        total += removed
    done = store.writing(job_deletion.finish)(job_id, now=201.0)
    assert done.finished_at == 201.0 and done.rows == total > 40
    assert _counts(store) == before
    with pytest.raises(JobNotFound):
        store.get_job(job_id)
    assert store.get_job(other).status.state is JobState.SUCCEEDED
    assert store.reading(job_deletion.read_newest)() == [done] and store.reading(job_deletion.read_unfinished)() == []


def test_a_deletion_is_done_in_bounded_steps_and_continued_after_a_crash(
    store: Store, ended: Callable[..., str]
) -> None:
    job_id = ended(20)
    store.writing(job_deletion.begin)(job_id, REQUEST, now=200.0)
    with store._database.write() as tx:
        assert job_deletion.remove_batch(tx, 1, Kind.JOB, limit=7) == 7
    assert [one.job_id for one in store.reading(job_deletion.read_unfinished)()] == [job_id], (
        "found by whoever looks for it"
    )
    assert store.writing(job_deletion.begin)(job_id, REQUEST, now=300.0).requested_at == 200.0, "the same deletion"
    while store.writing(job_deletion.remove_rows)(job_id):
        pass
    first = store.writing(job_deletion.finish)(job_id, now=301.0)
    assert store.writing(job_deletion.finish)(job_id, now=999.0) == first
    assert store.writing(job_deletion.remove_rows)(job_id) == 0
    assert store.writing(job_deletion.begin)(job_id, REQUEST, now=400.0) == first, "a repeated request finds it done"


def test_rows_of_a_job_that_is_not_being_deleted_are_never_removed(store: Store, ended: Callable[..., str]) -> None:
    job_id = ended()
    before = _counts(store)
    assert store.writing(job_deletion.remove_rows)(job_id) == 0
    assert _counts(store) == before


def test_a_job_that_is_being_deleted_can_neither_go_on_nor_be_pinned(store: Store, ended: Callable[..., str]) -> None:
    job_id = ended()
    name = CheckpointName(10, 1, 1)
    store.writing(checkpoint_rows.pin)(job_id, name, is_pinned=True, now=150.0)
    view = store.writing(job_deletion.begin)(job_id, REQUEST, now=200.0)
    assert view.kept == (f"/data/job/{name}",)
    with pytest.raises(RequestConflict, match="it is being deleted"):
        store.writing(checkpoint_rows.pin)(job_id, name, is_pinned=False, now=201.0)
    with pytest.raises(RequestConflict):
        store.writing(submissions.request)(job_id, Desired.RUN, now=201.0)


def test_the_error_of_a_deletion_is_kept_until_it_is_done(store: Store, ended: Callable[..., str]) -> None:
    job_id = ended()
    store.writing(job_deletion.begin)(job_id, REQUEST, now=200.0)
    assert store.writing(job_deletion.note_error)(job_id, "the storage is away").error == "the storage is away"
    assert [one.error for one in store.reading(job_deletion.read_newest)(project="default")] == ["the storage is away"]
    assert store.reading(job_deletion.read_newest)(project="another") == []
    assert store.writing(job_deletion.finish)(job_id, now=201.0).error == ""


def _remove(store: Store, job_id: str, kind: Kind) -> int:
    total = 0
    while removed := store.writing(job_deletion.remove_part)(job_id, kind, reason="it is old", before=total, now=500.0):
        total += removed
    return total


def _has(store: Store, job_id: str) -> frozenset[Kind]:
    found, _ = store.reading(job_deletion.find_ended_jobs)(before=1e9)
    return next(one.has for one in found if one.id == job_id)


def test_pages_name_what_each_ended_job_has(
    store: Store, ended: Callable[..., str], submit: Callable[..., str]
) -> None:
    ids = [ended(at=at, saved=(10, 20)) for at in (100.0, 300.0, 200.0)]
    submit()
    store.writing(checkpoint_rows.pin)(ids[0], CheckpointName(10, 1, 1), is_pinned=True, now=400.0)
    first, place = store.reading(job_deletion.find_ended_jobs)(before=250.0, limit=1)
    second, last = store.reading(job_deletion.find_ended_jobs)(before=250.0, after=place or BEGINNING, limit=1)
    assert [one.id for one in (*first, *second)] == [ids[0], ids[2]]
    assert last is not None and store.reading(job_deletion.find_ended_jobs)(before=250.0, after=last) == ([], None)
    [job] = first
    assert job.has == {Kind.LOGS, Kind.SERIES, Kind.EVENTS} and job.ended_at == 100.0
    assert job.committed == (CheckpointName(10, 1, 1), CheckpointName(20, 1, 1))
    assert job.kept == {CheckpointName(10, 1, 1)}


def test_a_job_that_another_one_goes_on_from_is_needed(
    store: Store, ended: Callable[..., str], submit: Callable[..., str]
) -> None:
    job_id = ended(saved=(10, 20))
    submit(continue_from={"job": job_id, "step": 10})
    [job], _ = store.reading(job_deletion.find_ended_jobs)(before=1e9)
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
    before = store.reading(curves.read_curve)(job_id, max_points=9)
    assert _remove(store, job_id, Kind.SERIES) == 64, "the last six are in no roll-up"
    assert store.reading(curves.read_curve)(job_id, max_points=9) == before
    assert [point.step for point in store.reading(curves.read_curve)(job_id, max_points=1000)][:3] == [8, 16, 24]
    assert [point.loss for point in store.reading(curves.read_curve)(job_id, max_points=1000)][:2] == [4.5, 12.5]
    assert store.reading(curves.read_curve)(job_id, max_points=1000)[-1].step == 70
    assert Kind.SERIES not in _has(store, job_id)


def test_an_archive_goes_once_no_job_names_it_and_it_was_not_uploaded_again(
    store: Store, ended: Callable[..., str]
) -> None:
    digests = {}
    for name in ("used", "unused", "young", "renewed"):
        data = name.encode()
        digests[name] = hashlib.sha256(data).hexdigest()
        store.writing(archives.put)(archives.check(digests[name], data), now=900.0 if name == "young" else 10.0)
    ended(code={"archive": digests["used"]})
    assert set(store.reading(archives.find_unused)(before=800.0)) == {digests["unused"], digests["renewed"]}
    store.writing(archives.put)(archives.check(digests["renewed"], b"renewed"), now=850.0)
    assert [name for name in digests if store.writing(archives.remove)(digests[name], before=800.0)] == ["unused"]
    assert [name for name in digests if store.reading(archives.exists)(digests[name])] == ["used", "young", "renewed"]


DAY = 86_400.0


def _note(store: Store, now: float, days_ago: float, actor: str) -> None:
    entry = AuditEntry(
        at=now - days_ago * DAY, address="10.0.0.1", operation="POST /v1/jobs", path="/v1/jobs", actor=actor
    )
    contextvars.copy_context().run(store.writing(access.record_refusal), entry, "done")


def test_old_records_go_once_a_day_and_leave_one(store: Store) -> None:
    clock = SystemClock()
    now = clock.time()
    for days, actor in ((400, "ada"), (370, "eve"), (365.5, "bob"), (364, "new")):
        _note(store, now, days, actor)
    config = RetentionConfig(rules=RetentionRules(audit_days=365))
    collector = RetentionCollector(store, JobStorage(""), clock, config, Count(Kind))

    planned = asyncio.run(collector.collect(dry_run=True, within_s=10, limit=10))
    assert [one.kind.value for one in planned.removals] == ["audit"]
    assert len(store.reading(access.read)(AuditQuery())) == 4, "a dry run deletes nothing"
    done = asyncio.run(collector.collect(dry_run=False, within_s=10, limit=10))
    assert [(one.kind.value, one.rows) for one in done.removals] == [("audit", 3)]
    newest, kept = store.reading(access.read)(AuditQuery())
    assert kept.actor == "new"
    assert (newest.actor, newest.operation) == ("retention", "retention of the audit")
    assert newest.path.startswith("3 records before 20") and "retain_audit_days, 365" in newest.path
    _note(store, now, 365.5, "just now too old")
    again = asyncio.run(collector.collect(dry_run=False, within_s=10, limit=10))
    assert again.removals == (), "not a deletion, and a record of it, for each record that becomes too old"


def test_for_ever_is_a_choice_and_days_are_not(store: Store) -> None:
    _note(store, SystemClock().time(), 4000, "ada")
    config = RetentionConfig(rules=RetentionRules(audit_days=0))
    collector = RetentionCollector(store, JobStorage(""), SystemClock(), config, Count(Kind))
    assert asyncio.run(collector.collect(dry_run=False, within_s=10, limit=10)).removals == ()
    assert load_settings(retain_audit_days=0).retention.audit_days == 0
    assert load_settings(retain_audit_days=30).retention.audit_days == 30
    with pytest.raises(SettingsError, match="kept for 30 days at least"):
        load_settings(retain_audit_days=29)
