"""JobSeries: the lines of all metrics of jobs. Of a job that has changed since the last scrape, the values that have
changed are rendered again; of others nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_service.telemetry.job_metrics import JOB_MFU
from shoal_service.telemetry.metric import Histogram, LiveJob, Metric
from shoal_service.telemetry.metric_names import OF_JOBS
from shoal_service.telemetry.text_format import header, series
from shoal_service.telemetry.utilisation import Utilisation

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

    def __init__(self, utilisation: Utilisation) -> None:
        self._utilisation = utilisation
        self._lock = threading.Lock()
        self._rendered: dict[str, _Rendered] = {}

    def text(self, live: Sequence[LiveJob], *, openmetrics: bool) -> str:
        """All families, also those without a series."""
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
        values[_MFU] = self._utilisation.of(job)
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
