"""Reports of supervisors as they arrive at the service, with the job's id as the token of its attempt."""

from typing import Any

from shoal_service.core.access import hash_secret
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.home import AttemptCaller, HomeReport
from shoal_service.reports import SupervisorReports
from shoal_service.store import Store, supervisor_links
from shoal_service.store.supervisor_links import ReceivedReport
from shoal_service.views import JobStatus
from shoal_workers.contract.job import JobState


def point(step: int) -> SeriesPoint:
    fixed = {"at": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 1.0, "step_s": 1.0}
    return SeriesPoint(step=step, loss=float(step), world_size=1, generation=1, **fixed)


def reported(seq: int, *steps: int, attempt: int = 1, **parts: Any) -> SupervisorReports:
    status = JobStatus(state=JobState.RUNNING, step=max(steps, default=0), **parts.pop("status", {}))
    return SupervisorReports(attempt=attempt, seq=seq, series=tuple(map(point, steps)), status=status, **parts)


def sent(
    job_id: str,
    reports: SupervisorReports | None,
    *,
    after: int = 0,
    token: str = "",
    attempt: int = 1,
    life: int = 1,
    now: float = 20.0,
) -> ReceivedReport:
    caller = AttemptCaller(job_id, attempt, hash_secret(token or job_id))
    return ReceivedReport(caller, HomeReport(life=life, after=after, reports=reports), now)


def take(store: Store, *arrived: ReceivedReport) -> list[Any]:
    return store.writing(supervisor_links.take_reports)(arrived)
