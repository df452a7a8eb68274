"""A change here breaks dashboards and alerts: make it on purpose, with a line in the changelog."""

from __future__ import annotations

import json
import re
from pathlib import Path

from shoal_service.telemetry.metric_names import ALL, Kind

SNAPSHOT = {
    "shoal_jobs": ("gauge", ("state",)),
    "shoal_job_workers": ("gauge", ("job_id",)),
    "shoal_job_desired_workers": ("gauge", ("job_id",)),
    "shoal_job_step": ("gauge", ("job_id",)),
    "shoal_job_loss": ("gauge", ("job_id",)),
    "shoal_job_tokens_per_second": ("gauge", ("job_id",)),
    "shoal_job_steps_lost_total": ("counter", ("job_id",)),
    "shoal_job_refused_calls_total": ("counter", ("job_id",)),
    "shoal_job_goodput_seconds": ("gauge", ("job_id", "category")),
    "shoal_job_goodput_ratio": ("gauge", ("job_id",)),
    "shoal_job_snapshots_healthy": ("gauge", ("job_id",)),
    "shoal_job_checkpoint_healthy": ("gauge", ("job_id",)),
    "shoal_job_checkpoint_step": ("gauge", ("job_id",)),
    "shoal_job_snapshot_share": ("gauge", ("job_id",)),
    "shoal_job_snapshot_every_steps": ("gauge", ("job_id",)),
    "shoal_job_node_loss_steps": ("gauge", ("job_id",)),
    "shoal_job_node_loss_max_steps": ("gauge", ("job_id",)),
    "shoal_job_gradient_log_lag_steps": ("gauge", ("job_id",)),
    "shoal_job_gradient_log_share": ("gauge", ("job_id",)),
    "shoal_checkpoint_bytes": ("gauge", ("job_id",)),
    "shoal_incidents_total": ("counter", ("cause",)),
    "shoal_recovery_seconds": ("histogram", ("cause", "phase")),
    "shoal_incident_steps_lost": ("histogram", ("cause",)),
    "shoal_incident_bytes_moved": ("histogram", ("cause",)),
    "shoal_checkpoint_seconds": ("histogram", ()),
    "shoal_queue_wait_seconds": ("histogram", ()),
    "shoal_scheduler_moves_total": ("counter", ("kind",)),
    "shoal_project_workers": ("gauge", ("project",)),
    "shoal_project_share": ("gauge", ("project",)),
    "shoal_project_queued_jobs": ("gauge", ("project",)),
    "shoal_lease_epoch": ("gauge", ()),
    "shoal_control_plane_leader": ("gauge", ()),
    "shoal_reports_dropped_total": ("counter", ("reason",)),
    "shoal_http_requests_total": ("counter", ("method", "route", "status")),
    "shoal_http_request_seconds": ("histogram", ("method", "route")),
}


def test_the_exported_names_are_these() -> None:
    assert {metric.name: (metric.kind.value, metric.labels) for metric in ALL} == SNAPSHOT


def test_every_metric_has_help_and_histograms_have_rising_buckets() -> None:
    for metric in ALL:
        assert metric.help.endswith(".")
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)


def test_the_dashboard_shows_only_metrics_that_exist() -> None:
    root = Path(__file__).parents[4]
    dashboard = json.loads((root / "deploy" / "grafana-dashboard.json").read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"shoal_\w+", target["expr"])
    }
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == set(SNAPSHOT) - {
        "shoal_reports_dropped_total",
        "shoal_job_refused_calls_total",
    }
