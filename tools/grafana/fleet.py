"""The dashboard of the fleet: all jobs, the queue, incidents, nodes."""

from __future__ import annotations

from grafana.panel import INTERVAL, Board, Look, Panel, Query, by_job, one, quantiles

_PRODUCTIVE = 'sum(max by (job_id) (shoal_job_goodput_seconds{category="productive"}))'
_ALL_SECONDS = "sum(max by (job_id, category) (shoal_job_goodput_seconds))"

FLEET = Board(
    "shoal-fleet",
    "Shoal: fleet",
    {
        "Now": (
            one("Running jobs", 'max(shoal_jobs{state="RUNNING"})', look=Look.NUMBER),
            one("Queued jobs", 'max(shoal_jobs{state="QUEUED"})', look=Look.NUMBER),
            one("Workers that train", "sum(max by (job_id) (shoal_job_workers))", look=Look.NUMBER),
            one(
                "Goodput of the live jobs",
                f"{_PRODUCTIVE} / {_ALL_SECONDS}",
                unit="percentunit",
                look=Look.NUMBER,
                help="Productive share of the worker-seconds that the jobs have requested since their submission.",
            ),
            one("Incidents of a day", "sum(max by (cause) (increase(shoal_incidents_total[24h])))", look=Look.NUMBER),
            one("Open incidents", "sum(max by (cause) (shoal_incidents_open))", look=Look.NUMBER),
        ),
        "Jobs": (
            one(
                "Jobs",
                "max by (job_id, name, project, priority, layout) (shoal_job_info)",
                look=Look.TABLE,
            ),
            one("Jobs by state", "max by (state) (shoal_jobs)", "{{state}}", look=Look.STACKED),
            by_job("Progress", "shoal_job_step / shoal_job_total_steps", "percentunit"),
            by_job("Loss", "shoal_job_loss"),
            by_job("Tokens per second", "shoal_job_tokens_per_second"),
            by_job("Model FLOPs utilisation", "shoal_job_mfu_ratio", "percentunit"),
            by_job("Goodput", "shoal_job_goodput_ratio", "percentunit"),
            Panel(
                "Workers wanted, granted, had",
                (
                    Query("sum(max by (job_id) (shoal_job_max_workers))", "wanted"),
                    Query("sum(max by (job_id) (shoal_job_desired_workers))", "granted"),
                    Query("sum(max by (job_id) (shoal_job_workers))", "had"),
                ),
            ),
            by_job("What a lost node would cost", "shoal_job_node_loss_steps", help="Completed steps."),
            by_job("Age of the newest checkpoint", "time() - shoal_job_checkpoint_timestamp_seconds", "s"),
        ),
        "Incidents": (
            one(
                "Incidents by cause",
                f"max by (cause) (increase(shoal_incidents_total[{INTERVAL}])) > 0",
                "{{cause}}",
                look=Look.STACKED,
            ),
            Panel(
                "Recovery by cause",
                quantiles("shoal_recovery_seconds", "cause", '{phase="recovery"}', "{{cause}}"),
                "s",
                help="From the failure's detection to the first completed step.",
            ),
            Panel("Recovery by phase", quantiles("shoal_recovery_seconds", "phase", legend="{{phase}}"), "s"),
            one(
                "Steps lost by cause",
                f"max by (cause) (increase(shoal_incident_steps_lost_sum[{INTERVAL}]))",
                "{{cause}}",
            ),
            one(
                "Bytes moved to restore",
                f"max by (cause) (increase(shoal_incident_bytes_moved_sum[{INTERVAL}]))",
                "{{cause}}",
                "bytes",
            ),
            by_job("Steps lost by job", "shoal_job_steps_lost_total"),
        ),
        "Queue": (
            one("Queued jobs by project", "max by (project) (shoal_project_queued_jobs)", "{{project}}"),
            one("Longest wait", "max by (project) (shoal_queue_longest_wait_seconds)", "{{project}}", "s"),
            Panel("Wait of the jobs that started", quantiles("shoal_queue_wait_seconds"), "s"),
            one("Workers by project", "max by (project) (shoal_project_workers)", "{{project}}", look=Look.STACKED),
            one("Share of the workers", "max by (project) (shoal_project_share)", "{{project}}", "percentunit"),
        ),
        "Nodes": (
            one(
                "Nodes by state",
                "sum by (state) (max by (cluster, state) (shoal_cluster_nodes))",
                "{{state}}",
                look=Look.STACKED,
            ),
            Panel(
                "CPUs and GPUs",
                (
                    Query("sum by (resource) (max by (cluster, resource) (shoal_cluster_resources))", "{{resource}}"),
                    Query(
                        "sum by (resource) (max by (cluster, resource) (shoal_cluster_free_resources))",
                        "{{resource}} free",
                    ),
                ),
            ),
            one(
                "/dev/shm in use",
                "1 - max by (node_id) (shoal_node_shm_free_bytes) / max by (node_id) (shoal_node_shm_bytes)",
                "{{node_id}}",
                "percentunit",
            ),
            one(
                "Disk of the checkpoints in use",
                "1 - max by (node_id) (shoal_node_disk_free_bytes) / max by (node_id) (shoal_node_disk_bytes)",
                "{{node_id}}",
                "percentunit",
            ),
            Panel("Checkpoint duration", quantiles("shoal_checkpoint_seconds"), "s"),
        ),
    },
)
