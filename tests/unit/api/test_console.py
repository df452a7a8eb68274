"""What the console of `shoal serve` reports. With a real store, and without its thread."""

import logging
from collections.abc import Mapping

from shoal_api.console import JobConsole
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.training import CheckpointCommitted
from shoal_service.core.events.workers import IncidentOpened
from shoal_service.reports import PendingEvent, SupervisorReports
from shoal_service.store import driving, reporting, submissions
from shoal_service.store.store import Store
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, IncidentCause, JobState

SPEC = parse_spec({"name": "byte-lm", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 30}})
OPENED = IncidentOpened(
    id=1, cause=IncidentCause.WORKER_DIED, witness="port", ranks=(2,), message="killed", generation=1, workers=4, step=9
)


class Reported:
    def __init__(self, store: Store, since: float = 0.0) -> None:
        self.lines: list[tuple[int, str, str]] = []
        self.console = JobConsole(store, since=since, log=self._add)

    def _add(self, level: int, event: str, fields: Mapping[str, object]) -> None:
        self.lines.append((level, event, f"{fields['job_name']}: {fields['text']}"))

    def round(self) -> list[tuple[int, str, str]]:
        self.lines.clear()
        self.console.report_changed()
        return list(self.lines)


def test_jobs_incidents_and_ends_are_reported_once_each(store: Store) -> None:
    lease = store.acquire_lease("me", ttl_s=100.0, now=0.0)
    assert lease is not None
    reported = Reported(store)
    job_id = store.writing(submissions.create)(SPEC, idempotency_key=None, now=1.0)[0].id
    assert reported.round() == [(logging.INFO, "job.created", "byte-lm: job created as byte-lm")]
    store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=4, now=2.0)
    assert reported.round() == []

    def report(seq: int, *events: PendingEvent, end: AttemptEnd | None = None) -> None:
        running = JobStatus(state=JobState.RUNNING, attempt=1, step=9)
        reports = SupervisorReports(attempt=1, seq=seq, status=running, events=events, end=end)
        store.writing(reporting.apply, lease.epoch)(job_id, reports, now=3.0)

    report(1)
    assert reported.round() == [(logging.INFO, "job.state", "byte-lm: job STARTING -> RUNNING")]
    report(2, PendingEvent.of(CheckpointCommitted(name="s", step=9, generation=1), 3.0), PendingEvent.of(OPENED, 3.0))
    assert reported.round() == [(logging.ERROR, "incident.opened", "byte-lm: incident worker_died of rank 2: killed")]
    report(3, end=AttemptEnd(reason=EndReason.FINISHED, message="done", step=30))
    assert reported.round() == [(logging.INFO, "job.state", "byte-lm: job RUNNING -> SUCCEEDED (finished): done")]
    assert reported.round() == []


def test_what_happened_before_the_server_started_is_not_reported(store: Store) -> None:
    job_id = store.writing(submissions.create)(SPEC, idempotency_key=None, now=1.0)[0].id
    reported = Reported(store, since=5.0)
    store.writing(submissions.request)(job_id, Desired.PAUSE, now=6.0)
    assert [event for _, event, _ in reported.round()] == ["job.state"]


def test_closing_reports_what_is_left(store: Store) -> None:
    reported = Reported(store)
    reported.console.start()
    store.writing(submissions.create)(SPEC, idempotency_key=None, now=1.0)
    reported.console.close()
    assert [event for _, event, _ in reported.lines] == ["job.created"]
