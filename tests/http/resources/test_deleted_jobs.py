"""A job is deleted over REST: files, rows, record; an interrupted deletion is continued. What is old is collected."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_api.client.errors import Conflict, NotFound
from shoal_service.artifact_views import ModelRequest
from shoal_service.clock import SystemClock
from shoal_service.control.job_storage import JobStorage
from shoal_service.control.retention import RetentionCollector, RetentionConfig
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.retention import DEFAULT_RULES, Kind, RetentionRules
from shoal_service.reports import SupervisorReports
from shoal_service.store import driving, histories, job_deletion, reporting, submissions
from shoal_service.store.job_deletion import DeletionRequest
from shoal_service.telemetry.tallies import Count
from shoal_service.views import CheckpointState, CheckpointView, JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, JobState
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName

STEPS = (10, 20, 30)
NAMES = {step: str(CheckpointName(step, 1, 1)) for step in STEPS}
DAY = 86_400.0


@pytest.fixture
def ended(service: Any, spec: dict[str, object]) -> Callable[..., tuple[str, Path]]:
    """A job with three checkpoints that ended some days ago; its id and its directory in the storage."""

    def run(days: float = 0.0, **changes: Any) -> tuple[str, Path]:
        now = time.time() - days * DAY
        parsed = parse_spec({**spec, **changes})
        job = service.store.writing(submissions.create)(parsed, idempotency_key=None, now=now)[0]
        service.store.writing(driving.begin_attempt, service.epoch)(job.id, workers=1, now=now)
        saved = tuple(
            CheckpointView(step=step, url=f"/x/{NAMES[step]}", state="committed", attempt=1, generation=1)
            for step in STEPS
        )
        end = AttemptEnd(reason=EndReason.FINISHED, step=30, message="")
        status = JobStatus(state=JobState.SUCCEEDED, checkpoint_step=30)
        done = SupervisorReports(attempt=1, seq=1, status=status, checkpoints=saved, end=end)
        service.store.writing(reporting.apply, service.epoch)(job.id, done, now=now)
        root = Path(service.checkpoint_url) / job.id
        for name in NAMES.values():
            (root / name).mkdir(parents=True)
            (root / name / MARKER_NAME).write_text("{}")
        (root / "profiles" / "1").mkdir(parents=True)
        return job.id, root

    return run


def test_a_job_is_deleted_with_its_files_and_the_record_stays(service: Any, ended: Callable[..., Any]) -> None:
    (job_id, root), (other, other_root) = ended(), ended()
    (root / "islands" / "round-000000" / "island-1").mkdir(parents=True)
    view = service.client.delete_job(job_id)
    assert view.finished_at is not None and (view.name, view.root) == ("tiny", str(root))
    assert view.requested_by == "bootstrap"
    assert not root.exists() and sorted(path.name for path in other_root.iterdir()) == ["profiles", *NAMES.values()]
    assert service.client.delete_job(job_id) == view, "idempotent"
    assert view in service.client.deletions(project="default")
    with pytest.raises(NotFound):
        service.client.job(job_id)
    assert job_id not in {job.id for job in service.client.jobs()}
    assert service.client.job(other).status.state is JobState.SUCCEEDED
    with pytest.raises(NotFound):
        service.client.delete_job("job-that-never-was")


def test_pinned_checkpoints_stay_and_so_do_files_that_are_not_the_jobs(service: Any, ended: Callable[..., Any]) -> None:
    job_id, root = ended()
    service.client.pin_checkpoint(job_id, NAMES[10])
    (root / "notes.txt").write_text("mine")
    (root / "job-of-another").mkdir()
    view = service.client.delete_job(job_id)
    assert view.kept == (f"{root}/{NAMES[10]}",)
    assert sorted(path.name for path in root.iterdir()) == ["job-of-another", "notes.txt", NAMES[10]]
    assert (root / NAMES[10] / MARKER_NAME).exists()


def test_retention_deletes_no_checkpoint_that_a_version_names_until_it_is_removed(
    service: Any, ended: Callable[..., Any]
) -> None:
    old, root = ended(days=4000)  # older than every rule
    service.client.register_model("kept", ModelRequest(job=old, step=10))
    service.client.gc()
    assert (root / NAMES[10] / MARKER_NAME).exists() and not (root / NAMES[20]).exists()
    assert service.client.model("default", "kept").state is CheckpointState.COMMITTED
    assert service.client.job(old).id == old, "nor the job, whose page the lineage leads to"
    service.client.delete_job(old)
    assert (root / NAMES[10] / MARKER_NAME).exists() and not (root / NAMES[30]).exists()
    assert service.client.model("default", "kept").state is None
    young, young_root = ended(days=100)
    service.client.register_model("kept", ModelRequest(job=young, step=10))
    service.client.gc()
    assert sorted(path.name for path in young_root.iterdir()) == ["profiles", NAMES[10], NAMES[30]]
    service.client.remove_model("default", "kept", 2)
    service.client.gc()
    assert sorted(path.name for path in young_root.iterdir()) == ["profiles", NAMES[30]]


def test_the_files_stay_if_they_are_to(service: Any, ended: Callable[..., Any]) -> None:
    job_id, root = ended()
    view = service.client.delete_job(job_id, checkpoints=False)
    assert view.finished_at is not None and not view.with_checkpoints
    assert sorted(path.name for path in root.iterdir()) == ["profiles", *NAMES.values()]


def test_a_running_job_is_refused_with_the_way_out(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise()
    with pytest.raises(Conflict, match=f"Cancel it first: `shoal cancel {job_id}`"):
        service.client.delete_job(job_id)
    assert service.client.job(job_id).status.state is JobState.RUNNING


def test_a_deletion_waits_for_the_storage_and_is_continued_by_the_control_plane(
    service: Any, ended: Callable[..., Any]
) -> None:
    job_id, root = ended()
    (root / "profiles").rename(root / "aside")
    (root / "profiles").write_text("not a directory")
    response = service.http.request("DELETE", f"/v1/jobs/{job_id}")
    assert response.status_code == 202 and "NotADirectoryError" in response.json()["error"]
    assert service.client.job(job_id).status.state is JobState.SUCCEEDED, "its history stays until its files are gone"
    (root / "profiles").unlink()
    _Collector(service).advance_all()
    assert service.store.reading(job_deletion.find)(job_id).finished_at is not None
    assert [path.name for path in root.iterdir()] == ["aside"]


def test_a_server_that_died_after_the_mark_is_made_up_for(service: Any, ended: Callable[..., Any]) -> None:
    job_id, root = ended()
    service.store.writing(job_deletion.begin)(job_id, DeletionRequest(root=str(root)), now=1.0)
    collector = _Collector(service)
    collector.advance_all()
    assert not root.exists() and service.store.reading(job_deletion.find)(job_id).finished_at is not None
    assert collector.tallies.value(Kind.JOB.value) == 1
    assert collector.tallies.value(Kind.CHECKPOINT.value) == len(STEPS)


def test_what_is_old_is_collected_and_a_dry_run_only_names_it(service: Any, ended: Callable[..., Any]) -> None:
    old, old_root = ended(days=100)
    young_root = ended(days=20)[1]
    service.client.pin_checkpoint(old, NAMES[10])

    def found(view: Any) -> list[tuple[Kind, str]]:
        return [(one.kind, one.name) for one in view.removals if one.job_id == old]

    dry = service.client.gc(dry_run=True)
    expected = [(Kind.CHECKPOINT, NAMES[20]), (Kind.LOGS, "tiny")]
    assert found(dry) == expected and dry.dry_run
    assert (old_root / NAMES[20]).exists() and service.store.reading(histories.read_logs)(old)
    done = service.client.gc()
    assert found(done) == expected and not any(one.error for one in done.removals)
    assert sorted(path.name for path in old_root.iterdir()) == ["profiles", NAMES[10], NAMES[30]]
    assert [one.state for one in service.client.checkpoints(old)] == [
        CheckpointState.COMMITTED,
        CheckpointState.DELETED,
        CheckpointState.COMMITTED,
    ]
    assert {event.type for event in service.store.reading(histories.read_events)(old)} >= {
        "checkpoint.deleted",
        "job.pruned",
    }
    again = service.client.gc()
    assert [kind for kind, _ in found(again)] in ([], [Kind.LOGS]), "the line about the checkpoint at most"
    assert found(service.client.gc()) == []
    assert sorted(path.name for path in young_root.iterdir()) == ["profiles", *NAMES.values()]


def test_an_old_job_with_the_ledger_of_islands_stays_until_all_of_them_have_ended(
    service: Any, spec: dict[str, object], ended: Callable[..., Any]
) -> None:
    first, root = ended(days=100, islands={"num": 2, "index": 0})
    other = service.client.submit({**spec, "islands": {"num": 2, "index": 1, "run": first}}).id
    (root / "islands" / "round-000000").mkdir(parents=True)
    collector = _Collector(service, RetentionRules(jobs_days=30))

    def collect() -> None:
        asyncio.run(collector.collect(dry_run=False, within_s=60, limit=100))

    collect()
    assert service.client.job(first).id == first and (root / "islands" / "round-000000").exists()
    service.client.cancel(other)
    collect()
    assert not root.exists()
    with pytest.raises(NotFound):
        service.client.job(first)


class _Collector(RetentionCollector):
    def __init__(self, service: Any, rules: RetentionRules = DEFAULT_RULES) -> None:
        self.tallies = Count(Kind)
        storage = JobStorage(service.checkpoint_url)
        config = RetentionConfig(rules=rules, every_s=0)
        super().__init__(service.store, storage, SystemClock(), config, self.tallies)

    def advance_all(self) -> None:
        """Runs it as the control plane does, until no deletion is open."""
        asyncio.run(self._advance_all())

    async def _advance_all(self) -> None:
        loop, stop, changed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        with self._store.subscribe(lambda _: loop.call_soon_threadsafe(changed.set)):
            task = asyncio.create_task(self.run(stop, self._store.read_lease))
            while self._store.reading(job_deletion.read_unfinished)():
                await asyncio.wait_for(changed.wait(), 60)
                changed.clear()
        stop.set()
        await task
