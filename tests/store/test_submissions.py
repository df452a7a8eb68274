"""Jobs that are submitted, listed, patched and requested, and the archives of their code."""

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from shoal_api.http.problems import NotReady
from shoal_service.control.submission import CodeUnknown
from shoal_service.core.desired import Desired
from shoal_service.core.where.language import LabelSelector
from shoal_service.store import (
    IdempotencyConflict,
    InvalidCursor,
    JobEnded,
    JobNotFound,
    PreconditionFailed,
    RequestConflict,
    Store,
    archives,
    checkpoint_rows,
    driving,
    histories,
    job_lists,
    submissions,
)
from shoal_service.store import errors as store_errors
from shoal_service.store.job_lists import FleetQuery
from shoal_service.views import ElasticityPatch, JobPatch
from shoal_workers.contract.checks.spec_errors import SpecProblem, parse_spec
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec

Submit = Callable[..., str]


def test_a_new_job_is_queued_and_has_an_event(store: Store, spec: JobSpec) -> None:
    job, created = store.writing(submissions.create)(spec, idempotency_key=None, now=5.0)

    assert created
    assert store.get_job(job.id) == job
    assert (job.status.state, job.spec, job.spec_version, job.created_at) == (JobState.QUEUED, spec, 1, 5.0)
    assert [(e.seq, e.type, e.at) for e in store.reading(histories.read_events)(job.id)] == [(1, "job.created", 5.0)]


def test_a_spec_is_returned_as_it_was_submitted(store: Store) -> None:
    data = {"stop": {"epochs": 0.5}, "task": "my.task:Own", "model": {"a": [1, {"ü": None}], "b": "\U0001f41f"}}
    spec = parse_spec(data)
    job, _ = store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)
    assert store.get_job(job.id).spec == spec


def test_every_operation_on_a_job_that_does_not_exist_raises_not_found(store: Store) -> None:
    asks: list[Callable[[], Any]] = [
        lambda: store.get_job("job-x"),
        lambda: store.reading(histories.read_events)("job-x"),
        lambda: store.reading(histories.read_logs)("job-x"),
        lambda: store.reading(histories.read_series)("job-x"),
        lambda: store.reading(histories.read_workers)("job-x"),
        lambda: store.reading(histories.read_incidents)("job-x"),
        lambda: store.reading(checkpoint_rows.read_checkpoints)("job-x"),
        lambda: store.writing(submissions.request)("job-x", Desired.PAUSE, now=1.0),
        lambda: store.writing(submissions.patch)("job-x", JobPatch(), if_match=None, now=1.0),
    ]
    for ask in asks:
        with pytest.raises(JobNotFound):
            ask()


class TestIdempotency:
    def test_the_key_still_holds_after_the_job_was_patched(self, store: Store, spec: JobSpec) -> None:
        first, _ = store.writing(submissions.create)(spec, idempotency_key="k", now=1.0)
        store.writing(submissions.patch)(first.id, JobPatch(priority=5), if_match=None, now=2.0)
        again, created = store.writing(submissions.create)(spec, idempotency_key="k", now=3.0)
        assert (again.id, again.spec.priority, created) == (first.id, 5, False)

    def test_without_a_key_every_submission_is_a_new_job(self, store: Store, spec: JobSpec) -> None:
        jobs = {store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)[0].id for _ in range(3)}
        assert len(jobs) == 3


class TestList:
    def test_a_full_last_page_has_no_cursor(self, store: Store, submit: Submit) -> None:
        for _ in range(2):
            submit()
        assert store.reading(job_lists.page)(FleetQuery(limit=2)).next_cursor is None

    def test_jobs_inserted_meanwhile_neither_repeat_nor_displace_others(self, store: Store, submit: Submit) -> None:
        made = [submit() for _ in range(6)]
        seen: list[str] = []
        cursor = None
        while True:
            page = store.reading(job_lists.page)(FleetQuery(limit=2), cursor)
            seen += [item.id for item in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
            submit()
        assert seen == made[::-1]

    def test_labels_and_words_filter_across_pages_and_beside_states(self, store: Store, submit: Submit) -> None:
        made = [submit(name=f"cod-{n}", labels={"sweep": "lr", "lr": f"{n}e-3"}) for n in range(5)]
        plain = submit(name="eel")
        first = store.reading(job_lists.page)(FleetQuery(labels=(LabelSelector("sweep", "lr"),), limit=3))
        second = store.reading(job_lists.page)(
            FleetQuery(labels=(LabelSelector("sweep", "lr"),), limit=3), first.next_cursor
        )
        assert [item.id for item in (*first.items, *second.items)] == made[::-1]
        assert [
            item.id
            for item in store.reading(job_lists.page)(FleetQuery(labels=(LabelSelector("sweep", negated=True),))).items
        ] == [plain]
        others = [LabelSelector("sweep"), LabelSelector("lr", "2e-3", negated=True)]
        assert (
            len(
                store.reading(job_lists.page)(
                    FleetQuery(labels=tuple(others), states=frozenset([JobState.QUEUED]))
                ).items
            )
            == 4
        )
        assert [item.id for item in store.reading(job_lists.page)(FleetQuery(search="COD lr=3e")).items] == [made[3]]

    @pytest.mark.parametrize("cursor", ["", "x", "!!!!", "am9iczo", "am9iczotMQ", "am9iczoxCg", "é", "A" * 5000])
    def test_a_cursor_of_another_list_is_refused(self, store: Store, cursor: str) -> None:
        with pytest.raises(InvalidCursor):
            store.reading(job_lists.page)(cursor=cursor)


class TestPatch:
    def test_a_patch_creates_a_new_version_and_keeps_the_other_sections(self, store: Store, submit: Submit) -> None:
        job_id = submit(elasticity={"min_workers": 2, "max_workers": 4})
        before = store.get_job(job_id)
        patch = JobPatch(elasticity=ElasticityPatch(max_workers=3), priority=9)
        after = store.writing(submissions.patch)(job_id, patch, if_match=before.etag, now=8.0)

        assert (after.spec.elasticity.min_workers, after.spec.elasticity.max_workers, after.spec.priority) == (2, 3, 9)
        assert (after.spec_version, after.updated_at) == (2, 8.0)
        assert after.etag != before.etag
        assert store.reading(histories.read_events)(job_id, after=1)[0].data == {
            "spec_version": 2,
            "elasticity": {"max_workers": 3},
            "priority": 9,
        }
        assert store.reading(job_lists.page)().items[0].priority == 9

    def test_a_patch_without_a_change_creates_no_version(self, store: Store, job_id: str) -> None:
        assert store.writing(submissions.patch)(job_id, JobPatch(priority=0), if_match=None, now=8.0).spec_version == 1
        assert len(store.reading(histories.read_events)(job_id)) == 1

    @pytest.mark.parametrize("wrap", ["{}", '"{}"', '"other", "{}"'])
    def test_if_match_may_be_written_as_a_header(self, store: Store, wrap: str, job_id: str) -> None:
        etag = store.get_job(job_id).etag
        assert (
            store.writing(submissions.patch)(
                job_id, JobPatch(priority=1), if_match=wrap.format(etag), now=2.0
            ).spec_version
            == 2
        )
        assert store.writing(submissions.patch)(job_id, JobPatch(priority=2), if_match="*", now=2.0).spec_version == 3

    def test_a_status_that_moves_on_does_not_change_the_etag(self, store: Store, job_id: str) -> None:
        before = store.get_job(job_id).etag
        assert store.writing(submissions.request)(job_id, Desired.PAUSE, now=2.0).etag == before


class TestRequests:
    def test_cancelling_a_queued_job_ends_it(self, store: Store, job_id: str) -> None:
        job = store.writing(submissions.request)(job_id, Desired.CANCEL, now=2.0)
        assert (job.status.state, job.ended_at) == (JobState.CANCELLED, 2.0)
        assert [e.type for e in store.reading(histories.read_events)(job_id)] == [
            "job.created",
            "job.requested",
            "job.state",
        ]

    def test_a_queued_job_can_be_paused_and_resumed(self, store: Store, job_id: str) -> None:
        assert store.writing(submissions.request)(job_id, Desired.PAUSE, now=2.0).status.state is JobState.PAUSED
        assert store.reading(driving.to_drive)() == []
        assert store.writing(submissions.request)(job_id, Desired.RUN, now=3.0).status.state is JobState.QUEUED
        assert [row.id for row in store.reading(driving.to_drive)()] == [job_id]

    def test_a_repeated_request_changes_nothing(self, store: Store, job_id: str) -> None:
        assert store.writing(submissions.request)(job_id, Desired.RUN, now=2.0).updated_at == 1.0
        assert len(store.reading(histories.read_events)(job_id)) == 1

    def test_a_cancel_cannot_be_taken_back(self, store: Store, begin: Callable[..., Any], job_id: str) -> None:
        begin(job_id)
        assert store.writing(submissions.request)(job_id, Desired.CANCEL, now=6.0).status.state is JobState.CANCELLING
        with pytest.raises(RequestConflict, match="CANCELLING"):
            store.writing(submissions.request)(job_id, Desired.RUN, now=7.0)


def test_every_error_survives_pickling() -> None:
    made: list[Exception] = [
        store_errors.StoreUnavailable("m"),
        JobNotFound("j"),
        InvalidCursor("c"),
        store_errors.InvalidArchive("m"),
        IdempotencyConflict("k", "j"),
        RequestConflict("j", JobState.PAUSED, "be started"),
        JobEnded("j", JobState.FAILED, "be paused"),
        PreconditionFailed("j", "a", "b"),
        store_errors.QueueFull("p", queued=2, max_queued=2),
        store_errors.LeaseLost(1, 2, "o"),
        CodeUnknown("00"),
        NotReady("m", (SpecProblem(path="store", message="m"),), {"Retry-After": "9"}),
    ]
    for error in made:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_an_archive_is_stored_once_under_its_hash(store: Store) -> None:
    data = bytes(range(256)) * 4096
    name = hashlib.sha256(data).hexdigest()
    assert store.reading(archives.get)(name) is None
    assert not store.reading(archives.exists)(name)
    for _ in range(2):
        store.writing(archives.put)(archives.check(name, data), now=1.0)
    assert store.reading(archives.exists)(name)
    assert store.reading(archives.get)(name) == data
