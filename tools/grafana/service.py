"""The dashboard of the control planes: leader, scheduler, HTTP, database, process."""

from __future__ import annotations

from grafana.panel import INTERVAL, Board, Look, Panel, Query, one


def _quantile(share: float, metric: str, by: str) -> str:
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({metric}_bucket[{INTERVAL}])))"


SERVICE = Board(
    "shoal-service",
    "Shoal: service",
    {
        "Control planes": (
            one("Leader", "shoal_control_plane_leader", "{{instance}}"),
            one("Epoch of the lease", "max(shoal_lease_epoch)"),
            one("Until the lease ends", "max(shoal_lease_expiry_timestamp_seconds) - time()", unit="s"),
            one("Clusters that answer", "max by (cluster) (shoal_cluster_connected)", "{{cluster}}"),
            one("Silence of gateways", "min by (cluster) (shoal_cluster_silent_seconds)", "{{cluster}}", "s"),
            one("CPU", f"rate(process_cpu_seconds_total[{INTERVAL}])", "{{instance}}"),
            one("Memory", "process_resident_memory_bytes", "{{instance}}", "bytes"),
            one(
                "Disk of the state in use",
                "1 - shoal_state_filesystem_free_bytes / shoal_state_filesystem_bytes",
                "{{instance}}",
                "percentunit",
            ),
            Panel(
                "Age of the newest backup",
                (Query("time() - max(shoal_backup_timestamp_seconds)", "age", "a backup"),),
                "s",
            ),
            one("Duration of a scrape", "scrape_duration_seconds", "{{instance}}", "s"),
        ),
        "Scheduler": (
            Panel(
                "Duration, 95 %",
                (
                    Query(_quantile(0.95, "shoal_scheduler_pass_seconds", "instance"), "pass {{instance}}"),
                    Query(_quantile(0.95, "shoal_scheduler_decide_seconds", "instance"), "decision {{instance}}"),
                ),
                "s",
            ),
            Panel(
                "Per second",
                (
                    Query(f"rate(shoal_scheduler_pass_seconds_count[{INTERVAL}])", "passes {{instance}}"),
                    Query(f"rate(shoal_scheduler_decide_seconds_count[{INTERVAL}])", "decisions {{instance}}"),
                    Query(f"rate(shoal_scheduler_failed_passes_total[{INTERVAL}])", "failed {{instance}}"),
                ),
            ),
            one(
                "Moves",
                f"sum by (kind) (increase(shoal_scheduler_moves_total[{INTERVAL}]))",
                "{{kind}}",
                look=Look.STACKED,
            ),
        ),
        "HTTP": (
            one(
                "Requests per second",
                f"sum by (route, status) (rate(shoal_http_requests_total[{INTERVAL}]))",
                "{{route}} {{status}}",
                look=Look.STACKED,
            ),
            one(
                "Latency, 95 %",
                _quantile(0.95, "shoal_http_request_seconds", "route"),
                "{{route}}",
                "s",
                help="Without streams and long polls.",
            ),
            one("Open streams", "shoal_http_streams", "{{instance}}"),
            one(
                "Refused with 429",
                f"sum by (limit) (increase(shoal_http_refused_total[{INTERVAL}]))",
                "{{limit}}",
            ),
        ),
        "Webhooks": (
            one(
                "Deliveries",
                f"sum by (hook, outcome) (increase(shoal_webhook_deliveries_total[{INTERVAL}]))",
                "{{hook}} {{outcome}}",
                look=Look.STACKED,
            ),
            Panel(
                "Time of a receiver, 95 %",
                (Query(_quantile(0.95, "shoal_webhook_seconds", "hook"), "{{hook}}", "a webhook"),),
                "s",
            ),
            Panel(
                "Waiting",
                (
                    Query("max by (hook) (shoal_webhook_lag_seconds)", "age of the oldest, {{hook}}"),
                    Query("max by (hook) (shoal_webhook_failing_jobs)", "jobs, {{hook}}"),
                ),
            ),
        ),
        "Database and reports": (
            one("Transactions, 95 %", _quantile(0.95, "shoal_database_seconds", "kind"), "{{kind}}", "s"),
            one(
                "Transactions per second",
                f"sum by (kind) (rate(shoal_database_seconds_count[{INTERVAL}]))",
                "{{kind}}",
            ),
            one("Transactions that failed", f"increase(shoal_database_errors_total[{INTERVAL}])", "{{instance}}"),
            one("Events per second", f"rate(shoal_events_total[{INTERVAL}])", "{{instance}}"),
            one(
                "Reports that were dropped",
                f"sum by (reason) (increase(shoal_reports_dropped_total[{INTERVAL}]))",
                "{{reason}}",
            ),
            one("Deleted", f"sum by (kind) (increase(shoal_removed_total[{INTERVAL}]))", "{{kind}}"),
        ),
    },
)
