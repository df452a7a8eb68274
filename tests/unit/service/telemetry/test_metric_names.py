"""The names of all metrics, those of requests and steps, and the format that a scraper gets."""

import gzip
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal_service.telemetry.catalogue import ALL
from shoal_service.telemetry.metric import STEP_BOUNDS_S, Kind, StepTimes
from shoal_service.telemetry.tallies import RequestMetrics
from shoal_service.telemetry.text_format import OPENMETRICS, TEXT, compressed, media_type_of

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
    "shoal_worker_gpu_celsius": ("gauge", ("job_id", "rank")),
    "shoal_worker_gpu_watts": ("gauge", ("job_id", "rank")),
    "shoal_worker_busy_ratio": ("gauge", ("job_id", "rank")),
    "shoal_worker_received_bytes_per_second": ("gauge", ("job_id", "rank")),
    "shoal_worker_sent_bytes_per_second": ("gauge", ("job_id", "rank")),
    "shoal_worker_disk_read_bytes_per_second": ("gauge", ("job_id", "rank")),
    "shoal_worker_disk_written_bytes_per_second": ("gauge", ("job_id", "rank")),
    "shoal_job_phase_ratio": ("gauge", ("job_id", "phase")),
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
    "shoal_cluster_connected": ("gauge", ("cluster",)),
    "shoal_cluster_silent_seconds": ("gauge", ("cluster",)),
    "shoal_cluster_nodes": ("gauge", ("cluster", "state")),
    "shoal_cluster_resources": ("gauge", ("cluster", "resource")),
    "shoal_cluster_free_resources": ("gauge", ("cluster", "resource")),
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


def test_requests_are_counted_by_method_route_and_class_of_status() -> None:
    metrics = RequestMetrics()
    for status in (200, 201, 404, 500, 0):
        metrics.observe("GET", "/v1/jobs", status, 0.02)
    assert metrics.requests() == {
        ("GET", "/v1/jobs", "2xx"): 2,
        ("GET", "/v1/jobs", "4xx"): 1,
        ("GET", "/v1/jobs", "5xx"): 1,
        ("GET", "/v1/jobs", "none"): 1,
    }
    latency = metrics.latencies()["GET", "/v1/jobs"]
    assert latency.count == 5
    assert abs(latency.total - 0.1) < 1e-9


def test_clients_cannot_make_it_grow_without_bound() -> None:
    metrics = RequestMetrics()
    for i in range(1000):
        metrics.observe(f"X{i}", f"/route/{i}", 200, 0.0)
    assert len(metrics.requests()) <= 201
    assert sum(metrics.requests().values()) == 1000
    assert {method for method, _, _ in metrics.requests()} == {"other"}


def test_no_request_is_lost_between_threads() -> None:
    metrics = RequestMetrics()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: metrics.observe("GET", f"/{i % 3}", 200, 0.01), range(2000)))
    assert sum(metrics.requests().values()) == 2000


def test_a_value_on_a_bound_belongs_to_it() -> None:
    metrics = RequestMetrics()
    metrics.observe("GET", "/", 200, 0.001)
    metrics.observe("GET", "/", 200, 61.0)
    latency = metrics.latencies()["GET", "/"]
    assert (latency.counts[0], latency.counts[-1], latency.count) == (1, 1, 2)


def test_a_stream_is_counted_and_its_duration_is_not() -> None:
    metrics = RequestMetrics()
    metrics.stream_opened()
    assert metrics.num_streams == 1
    metrics.observe("GET", "/v1/jobs/{job_id}/events", 200, None)
    metrics.stream_closed()
    assert metrics.num_streams == 0
    assert metrics.latencies() == {} and len(metrics.requests()) == 1


def test_a_step_time_on_a_bound_belongs_to_it() -> None:
    times = StepTimes().add([STEP_BOUNDS_S[0], STEP_BOUNDS_S[-1] + 1])
    assert (times.counts[0], times.counts[-1], sum(times.counts)) == (1, 1, 2)


def test_it_survives_its_column_exactly() -> None:
    times = StepTimes().add([0.1, 0.2, 0.3]).add([7.7])
    assert StepTimes.read(times.text()) == times


def test_an_empty_column_and_other_buckets_begin_at_zero() -> None:
    assert StepTimes.read("") == StepTimes.read("1 2 3 0.5") == StepTimes()


PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;"
    "version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("Application/OpenMetrics-Text; Version=1.0.0", OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=0, */*", TEXT),
        ("application/openmetrics-text;version=1.0.0;q=0.2, text/plain;q=0.9", TEXT),
        ("application/openmetrics-text;version=1.0.0;q=0.9, text/plain;q=0.2", OPENMETRICS),
        ("application/openmetrics-text, text/plain;q=0, */*", OPENMETRICS),
        ("application/openmetrics-text;version=9.9.9", TEXT),
        ("application/openmetrics-text;version=1.0.0\r\nx: y", TEXT),
        ("application/openmetrics-text;q=much", TEXT),
        ("application/json", TEXT),
    ],
)
def test_a_scraper_gets_the_format_that_it_prefers_of_a_version_that_there_is(accept: str, expected: str) -> None:
    assert media_type_of(accept) == expected


@pytest.mark.parametrize(
    ("accept", "is_small"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip;q=0.0, *", False),
        ("", False),
    ],
)
def test_only_who_accepts_gzip_gets_it(accept: str, is_small: bool) -> None:
    body = b"shoal_jobs 1\n" * 1000
    small = compressed(body, accept)
    assert (small is not None and gzip.decompress(small) == body) == is_small
    assert compressed(b"shoal_jobs 1\n", accept) is None
