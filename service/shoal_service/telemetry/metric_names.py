"""Every metric that Shoal exports, in the order in which it is shown.

The exposition shows what is declared here; `make docs` lists it. A renamed metric breaks the dashboards and alerts of
users, so a test compares the names with a snapshot.
"""

from __future__ import annotations

from shoal_service.telemetry import job_metrics, service_metrics
from shoal_service.telemetry.metric import Metric, declared

OF_JOBS: tuple[Metric, ...] = tuple(declared(vars(job_metrics)))
"""Rendered for each live job."""
ALL: tuple[Metric, ...] = (*OF_JOBS, *declared(vars(service_metrics)))
