"""JobSeries: the lines of all metrics of jobs. Only jobs that have changed since the last scrape are rendered again."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal_service.telemetry.metric import Histogram, LiveJob, Metric
from shoal_service.telemetry.metric_names import OF_JOBS
from shoal_service.telemetry.text_format import header, series
from shoal_service.telemetry.utilisation import Utilisation


class JobSeries:
    """Thread-safe. Compares jobs by identity: the store returns the same object for a row that has not changed."""

    def __init__(self, utilisation: Utilisation) -> None:
        self._utilisation = utilisation
        self._lock = threading.Lock()
        self._rendered: dict[str, tuple[LiveJob, list[str]]] = {}

    def text(self, live: Sequence[LiveJob], *, openmetrics: bool) -> str:
        """All families, also those without a series."""
        with self._lock:
            kept = {}
            for job in live:
                known = self._rendered.get(job.job_id)
                kept[job.job_id] = known if known is not None and known[0] is job else (job, self._render(job))
            self._rendered = kept
            self._utilisation.forget_all_but(kept.keys())
        columns = zip(*(lines for _, lines in kept.values()), strict=True) if kept else ((),) * len(OF_JOBS)
        families = zip(OF_JOBS, columns, strict=True)
        return "".join(header(metric, openmetrics=openmetrics) + "".join(lines) for metric, lines in families)

    def _render(self, job: LiveJob) -> list[str]:
        """The lines of each metric."""
        shown = replace(job, mfu=self._utilisation.of(job))
        return [_lines(metric, shown) for metric in OF_JOBS]


def _lines(metric: Metric, job: LiveJob) -> str:
    assert metric.of_job is not None
    values = metric.of_job(job)
    if values is None:
        return ""
    if isinstance(values, Mapping):
        return "".join(series(metric, (job.job_id, *labels), value) for labels, value in values.items())
    assert isinstance(values, float | int | Histogram)
    return series(metric, (job.job_id,), values)
