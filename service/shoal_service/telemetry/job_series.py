"""JobSeries: the lines of all metrics of jobs, as Prometheus reads them.

Only what has changed since the last scrape is rendered again: of a job that has changed, the values that differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_service.planner import HardwareProfile
from shoal_service.planner.shape import shape_of
from shoal_service.telemetry.catalogue import JOB_MFU, OF_JOBS
from shoal_service.telemetry.metric import Histogram, LiveJob, Metric
from shoal_service.telemetry.text_format import header, series
from shoal_workers.contract.spec import JobSpec

ProfileOf = Callable[[JobSpec], HardwareProfile]
"""The profile with which the planner plans the job."""
_VALUES = [metric.of_job for metric in OF_JOBS if metric.of_job is not None]
_MFU = OF_JOBS.index(JOB_MFU)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """One job, as it was at the last scrape. The lists have a place for each metric."""

    job: LiveJob
    values: list[Any]
    lines: list[str]


class JobSeries:
    """Thread-safe. Compares jobs by identity: the store returns the same object for a row that has not changed."""

    def __init__(self, profile_of: ProfileOf) -> None:
        self._utilisation = _Utilisation(profile_of)
        self._lock = threading.Lock()
        self._rendered: dict[str, _Rendered] = {}

    def text(self, live: Sequence[LiveJob], *, openmetrics: bool) -> str:
        """The lines of all families, including those without a series."""
        with self._lock:
            kept = {}
            for job in live:
                known = self._rendered.get(job.job_id)
                kept[job.job_id] = known if known is not None and known.job is job else self._render(job, known)
            self._rendered = kept
            self._utilisation.forget_all_but(kept.keys())
        columns = zip(*(one.lines for one in kept.values()), strict=True) if kept else ((),) * len(OF_JOBS)
        families = zip(OF_JOBS, columns, strict=True)
        return "".join(header(metric, openmetrics=openmetrics) + "".join(lines) for metric, lines in families)

    def _render(self, job: LiveJob, before: _Rendered | None) -> _Rendered:
        values = [of_job(job) for of_job in _VALUES]
        values[_MFU] = self._utilisation.of_job(job)
        if before is None:
            lines = [_lines(metric, job.job_id, now) for metric, now in zip(OF_JOBS, values, strict=True)]
        else:
            compared = zip(OF_JOBS, values, before.values, before.lines, strict=True)
            lines = [text if now == old else _lines(metric, job.job_id, now) for metric, now, old, text in compared]
        return _Rendered(job, values, lines)


def _lines(metric: Metric, job_id: str, values: Any) -> str:
    if values is None:
        return ""
    if isinstance(values, Mapping):
        return "".join(series(metric, (job_id, *labels), value) for labels, value in values.items())
    assert isinstance(values, float | int | Histogram)
    return series(metric, (job_id,), values)


class _Utilisation:
    """Measures the model FLOPs utilisation of jobs. One thread at a time.

    The planner counts the FLOPs of a token, and the profile of the node gives the peak; throughput and world size are
    those of the job's status. The FLOPs of each job's model are remembered.
    """

    def __init__(self, profile_of: ProfileOf) -> None:
        self._profile_of = profile_of
        self._known: dict[str, tuple[JobSpec, float, HardwareProfile] | None] = {}

    def of_job(self, job: LiveJob) -> float | None:
        """The utilisation of a job; None if the planner does not know the model, or nothing was measured yet."""
        status = job.status
        known = self._known.get(job.job_id)
        if job.job_id not in self._known or (known is not None and known[0] is not job.spec):
            known = self._known[job.job_id] = self._learn(job.spec)
        if known is None or not status.tokens_per_s or not status.workers:
            return None
        spec, flops_per_token, profile = known
        peak = profile.peak_flops[spec.precision] * status.workers / profile.sharing(status.workers)
        return flops_per_token * status.tokens_per_s / peak

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        self._known = {job_id: known for job_id, known in self._known.items() if job_id in job_ids}

    def _learn(self, spec: JobSpec) -> tuple[JobSpec, float, HardwareProfile] | None:
        shape = shape_of(spec)
        profile = self._profile_of(spec)
        if shape is None or not profile.peak_flops.get(spec.precision):
            return None
        return spec, shape.flops_per_token, profile
