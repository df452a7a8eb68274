"""A change here breaks dashboards and alerts: make it on purpose, with a line in the changelog."""

from __future__ import annotations

from shoal_service.telemetry.metric import Kind
from shoal_service.telemetry.metric_names import ALL

SNAPSHOT = {
    "shoal_job_info": ("gauge", ("job_id", "name", "layout", "priority", "project")),
    "shoal_job_state": ("gauge", ("job_id", "state")),
    "shoal_job_start_timestamp_seconds": ("gauge", ("job_id",)),
    "shoal_job_report_timestamp_seconds": ("gauge", ("job_id",)),
    "shoal_job_attempts_total": ("counter", ("job_id",)),
    "shoal_job_workers": ("gauge", ("job_id",)),
    "shoal_job_desired_workers": ("gauge", ("job_id",)),
    "shoal_job_max_workers": ("gauge", ("job_id",)),
    "shoal_job_step": ("gauge", ("job_id",)),
    "shoal_job_total_steps": ("gauge", ("job_id",)),
    "shoal_job_step_timestamp_seconds": ("gauge", ("job_id",)),
    "shoal_job_loss": ("gauge", ("job_id",)),
    "shoal_job_validation_loss": ("gauge", ("job_id",)),
    "shoal_job_task_metric": ("gauge", ("job_id", "metric", "split")),
    "shoal_job_gradient_norm": ("gauge", ("job_id",)),
    "shoal_job_learning_rate": ("gauge", ("job_id",)),
    "shoal_job_tokens_per_second": ("gauge", ("job_id",)),
    "shoal_job_samples_per_second": ("gauge", ("job_id",)),
    "shoal_job_mfu_ratio": ("gauge", ("job_id",)),
    "shoal_job_step_seconds": ("histogram", ("job_id",)),
    "shoal_job_communication_ratio": ("gauge", ("job_id",)),
    "shoal_job_data_wait_ratio": ("gauge", ("job_id",)),
    "shoal_job_goodput_seconds": ("gauge", ("job_id", "category")),
    "shoal_job_recovering_seconds": ("gauge", ("job_id", "cause")),
    "shoal_job_goodput_ratio": ("gauge", ("job_id",)),
    "shoal_job_incidents_total": ("counter", ("job_id",)),
    "shoal_job_steps_lost_total": ("counter", ("job_id",)),
    "shoal_job_refused_calls_total": ("counter", ("job_id",)),
    "shoal_job_snapshot_share": ("gauge", ("job_id",)),
    "shoal_job_snapshot_every_steps": ("gauge", ("job_id",)),
    "shoal_job_snapshots_healthy": ("gauge", ("job_id",)),
    "shoal_job_node_loss_steps": ("gauge", ("job_id",)),
    "shoal_job_node_loss_max_steps": ("gauge", ("job_id",)),
    "shoal_job_gradient_log_lag_steps": ("gauge", ("job_id",)),
    "shoal_job_gradient_log_share": ("gauge", ("job_id",)),
    "shoal_job_checkpoint_healthy": ("gauge", ("job_id",)),
    "shoal_job_checkpoint_step": ("gauge", ("job_id",)),
    "shoal_job_checkpoint_timestamp_seconds": ("gauge", ("job_id",)),
    "shoal_job_checkpoint_last_seconds": ("gauge", ("job_id",)),
    "shoal_checkpoint_bytes": ("gauge", ("job_id",)),
    "shoal_worker_info": ("gauge", ("job_id", "rank", "node_id")),
    "shoal_worker_cpu_cores": ("gauge", ("job_id", "rank")),
    "shoal_worker_resident_bytes": ("gauge", ("job_id", "rank")),
    "shoal_worker_gpu_used_bytes": ("gauge", ("job_id", "rank")),
    "shoal_worker_gpu_busy_ratio": ("gauge", ("job_id", "rank")),
    "shoal_jobs": ("gauge", ("state",)),
    "shoal_queue_wait_seconds": ("histogram", ()),
    "shoal_queue_longest_wait_seconds": ("gauge", ("project",)),
    "shoal_scheduler_moves_total": ("counter", ("kind",)),
    "shoal_scheduler_pass_seconds": ("histogram", ()),
    "shoal_scheduler_decide_seconds": ("histogram", ()),
    "shoal_scheduler_failed_passes_total": ("counter", ()),
    "shoal_project_workers": ("gauge", ("project",)),
    "shoal_project_share": ("gauge", ("project",)),
    "shoal_project_queued_jobs": ("gauge", ("project",)),
    "shoal_incidents_total": ("counter", ("cause",)),
    "shoal_incidents_open": ("gauge", ("cause",)),
    "shoal_recovery_seconds": ("histogram", ("cause", "phase")),
    "shoal_incident_steps_lost": ("histogram", ("cause",)),
    "shoal_incident_bytes_moved": ("histogram", ("cause",)),
    "shoal_checkpoint_seconds": ("histogram", ()),
    "shoal_cluster_connected": ("gauge", ()),
    "shoal_cluster_nodes": ("gauge", ("state",)),
    "shoal_cluster_resources": ("gauge", ("resource",)),
    "shoal_cluster_free_resources": ("gauge", ("resource",)),
    "shoal_node_shm_bytes": ("gauge", ("node_id",)),
    "shoal_node_shm_free_bytes": ("gauge", ("node_id",)),
    "shoal_node_disk_bytes": ("gauge", ("node_id",)),
    "shoal_node_disk_free_bytes": ("gauge", ("node_id",)),
    "shoal_lease_epoch": ("gauge", ()),
    "shoal_lease_expiry_timestamp_seconds": ("gauge", ()),
    "shoal_control_plane_leader": ("gauge", ()),
    "shoal_state_filesystem_bytes": ("gauge", ()),
    "shoal_state_filesystem_free_bytes": ("gauge", ()),
    "shoal_backup_timestamp_seconds": ("gauge", ()),
    "shoal_reports_dropped_total": ("counter", ("reason",)),
    "shoal_events_total": ("counter", ()),
    "shoal_database_seconds": ("histogram", ("kind",)),
    "shoal_database_errors_total": ("counter", ()),
    "shoal_removed_total": ("counter", ("kind",)),
    "shoal_webhook_deliveries_total": ("counter", ("hook", "outcome")),
    "shoal_webhook_seconds": ("histogram", ("hook",)),
    "shoal_webhook_lag_seconds": ("gauge", ("hook",)),
    "shoal_webhook_failing_jobs": ("gauge", ("hook",)),
    "shoal_http_requests_total": ("counter", ("method", "route", "status")),
    "shoal_http_request_seconds": ("histogram", ("method", "route")),
    "shoal_http_streams": ("gauge", ()),
    "shoal_http_refused_total": ("counter", ("limit",)),
}


def test_the_exported_names_are_these() -> None:
    assert {metric.name: (metric.kind.value, metric.labels) for metric in ALL} == SNAPSHOT


def test_every_metric_has_help_and_histograms_have_rising_buckets() -> None:
    for metric in ALL:
        assert metric.help.endswith(".")
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
