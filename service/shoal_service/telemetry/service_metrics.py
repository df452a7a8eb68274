"""The metrics that are not of one job: jobs in total, queue, incidents, nodes, and the control plane itself."""

from __future__ import annotations

from shoal_service.telemetry.metric import Kind, Metric

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
"""Buckets of what usually takes milliseconds, seconds."""

JOBS = Metric("shoal_jobs", Kind.GAUGE, "Jobs in each state, including ended ones.", ("state",))

QUEUE_WAIT_SECONDS = Metric(
    "shoal_queue_wait_seconds",
    Kind.HISTOGRAM,
    "Seconds from the submission of a job to its first start, over all jobs that have started.",
    (),
    (0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400),
)
QUEUE_LONGEST_SECONDS = Metric(
    "shoal_queue_longest_wait_seconds",
    Kind.GAUGE,
    "Seconds for which the job of a project that has been in the queue longest has been there; 0: none is.",
    ("project",),
)
SCHEDULER_MOVES = Metric(
    "shoal_scheduler_moves_total",
    Kind.COUNTER,
    "Changes of jobs' workers that the scheduler of this process has made, by kind; preempt: it took all of them.",
    ("kind",),
)
SCHEDULER_PASS_SECONDS = Metric(
    "shoal_scheduler_pass_seconds",
    Kind.HISTOGRAM,
    "Seconds of the passes of this process's control loop.",
    (),
    _FAST,
)
SCHEDULER_DECIDE_SECONDS = Metric(
    "shoal_scheduler_decide_seconds",
    Kind.HISTOGRAM,
    "Seconds that the scheduling policy took to decide; not every pass asks it.",
    (),
    _FAST,
)
SCHEDULER_FAILED_PASSES = Metric(
    "shoal_scheduler_failed_passes_total",
    Kind.COUNTER,
    "Passes of this process's control loop that failed: the lease was lost, Ray did not answer, or an error.",
)
PROJECT_WORKERS = Metric(
    "shoal_project_workers",
    Kind.GAUGE,
    "Workers that are granted to the jobs of a project; default includes projects that are not defined.",
    ("project",),
)
PROJECT_SHARE = Metric(
    "shoal_project_share", Kind.GAUGE, "Share of all granted workers that the jobs of a project have.", ("project",)
)
PROJECT_QUEUED_JOBS = Metric("shoal_project_queued_jobs", Kind.GAUGE, "Queued jobs of a project.", ("project",))

INCIDENTS = Metric(
    "shoal_incidents_total",
    Kind.COUNTER,
    "Incidents of all jobs that are over, by cause: while one is open, its cause may be corrected.",
    ("cause",),
)
OPEN_INCIDENTS = Metric(
    "shoal_incidents_open", Kind.GAUGE, "Incidents of all jobs that are not over, by cause so far.", ("cause",)
)
RECOVERY_SECONDS = Metric(
    "shoal_recovery_seconds",
    Kind.HISTOGRAM,
    "Seconds that closed incidents took, by cause and phase; phase recovery is the whole, up to the first new step.",
    ("cause", "phase"),
    (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 30, 60, 300, 1800),
)
INCIDENT_STEPS_LOST = Metric(
    "shoal_incident_steps_lost",
    Kind.HISTOGRAM,
    "Completed steps that were repeated after a closed incident, by cause.",
    ("cause",),
    (0, 1, 2, 5, 10, 25, 50, 100, 500, 1000),
)
INCIDENT_BYTES_MOVED = Metric(
    "shoal_incident_bytes_moved",
    Kind.HISTOGRAM,
    "Bytes that all ranks together read to restore after a closed incident, by cause.",
    ("cause",),
    (2**20, 2**23, 2**26, 2**28, 2**30, 2**32, 2**34, 2**36, 2**38, 2**40),
)
CHECKPOINT_SECONDS = Metric(
    "shoal_checkpoint_seconds",
    Kind.HISTOGRAM,
    "Seconds from the staging of the first rank to the commit of a checkpoint, over all jobs, deleted ones included.",
    (),
    (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)

CLUSTER_CONNECTED = Metric(
    "shoal_cluster_connected",
    Kind.GAUGE,
    "1 while a cluster's gateway reports to the service and its Ray head answers the gateway, else 0.",
    ("cluster",),
)
CLUSTER_SILENT = Metric(
    "shoal_cluster_silent_seconds",
    Kind.GAUGE,
    "Seconds since the newest report of a cluster's gateway; absent: none has come.",
    ("cluster",),
)
CLUSTER_NODES = Metric(
    "shoal_cluster_nodes",
    Kind.GAUGE,
    "Nodes of a connected Ray cluster, each in one state.",
    ("cluster", "state"),
)
CLUSTER_RESOURCES = Metric(
    "shoal_cluster_resources",
    Kind.GAUGE,
    "CPUs and GPUs of all live nodes of a connected Ray cluster.",
    ("cluster", "resource"),
)
CLUSTER_FREE_RESOURCES = Metric(
    "shoal_cluster_free_resources",
    Kind.GAUGE,
    "CPUs and GPUs of a connected Ray cluster that nothing has reserved.",
    ("cluster", "resource"),
)
NODE_SHM_BYTES = Metric(
    "shoal_node_shm_bytes", Kind.GAUGE, "Size of /dev/shm of a node on which a worker trains, in bytes.", ("node_id",)
)
NODE_SHM_FREE_BYTES = Metric(
    "shoal_node_shm_free_bytes", Kind.GAUGE, "Free bytes of /dev/shm of a node on which a worker trains.", ("node_id",)
)
NODE_DISK_BYTES = Metric(
    "shoal_node_disk_bytes",
    Kind.GAUGE,
    "Size of the filesystem to which a node's workers save checkpoints (of temporary files if it is none), in bytes.",
    ("node_id",),
)
NODE_DISK_FREE_BYTES = Metric("shoal_node_disk_free_bytes", Kind.GAUGE, "Free bytes of that filesystem.", ("node_id",))

LEASE_EPOCH = Metric("shoal_lease_epoch", Kind.GAUGE, "Epoch of the lease on the jobs; rises with each new owner.")
LEASE_EXPIRY = Metric(
    "shoal_lease_expiry_timestamp_seconds",
    Kind.GAUGE,
    "When the lease on the jobs ends if it is not renewed, Unix time.",
)
CONTROL_PLANE_LEADER = Metric(
    "shoal_control_plane_leader", Kind.GAUGE, "1 on the control plane that holds the lease, 0 on every other."
)
STATE_BYTES = Metric(
    "shoal_state_filesystem_bytes", Kind.GAUGE, "Size of the filesystem of this control plane's state_dir, in bytes."
)
STATE_FREE_BYTES = Metric("shoal_state_filesystem_free_bytes", Kind.GAUGE, "Free bytes of that filesystem.")
BACKUP_AT = Metric(
    "shoal_backup_timestamp_seconds",
    Kind.GAUGE,
    "When `shoal backup` last succeeded with this control plane's state_dir, Unix time; absent: never.",
)
REPORTS_DROPPED = Metric(
    "shoal_reports_dropped_total",
    Kind.COUNTER,
    "Reports of supervisors that this process did not store, by reason.",
    ("reason",),
)
EVENTS = Metric("shoal_events_total", Kind.COUNTER, "Events of jobs that this process has stored.")
DATABASE_SECONDS = Metric(
    "shoal_database_seconds",
    Kind.HISTOGRAM,
    "Seconds of this process's transactions, by kind (read, write), with the wait for the database's lock.",
    ("kind",),
    _FAST,
)
DATABASE_ERRORS = Metric(
    "shoal_database_errors_total", Kind.COUNTER, "Transactions that failed because the database did not answer."
)
REMOVED = Metric(
    "shoal_removed_total",
    Kind.COUNTER,
    "What this process has deleted on request or by retention: jobs, checkpoints, archives, and rows of logs, series "
    "and events of ended jobs.",
    ("kind",),
)

WEBHOOK_DELIVERIES = Metric(
    "shoal_webhook_deliveries_total",
    Kind.COUNTER,
    "Deliveries of events by this process, by hook (jobs: those of all specs) and outcome; gave_up: events whose "
    "attempts have ended, failed: attempts that are repeated.",
    ("hook", "outcome"),
)
WEBHOOK_SECONDS = Metric(
    "shoal_webhook_seconds",
    Kind.HISTOGRAM,
    "Seconds until a receiver had answered an attempt of this process, or the attempt had failed.",
    ("hook",),
    _FAST,
)
WEBHOOK_LAG_SECONDS = Metric(
    "shoal_webhook_lag_seconds",
    Kind.GAUGE,
    "Age of the oldest event that a receiver has not accepted after a failed attempt; 0: there is none.",
    ("hook",),
)
WEBHOOK_FAILING = Metric(
    "shoal_webhook_failing_jobs", Kind.GAUGE, "Jobs whose events wait after a failed attempt.", ("hook",)
)

HTTP_REQUESTS = Metric(
    "shoal_http_requests_total",
    Kind.COUNTER,
    "Finished requests by method, route template and class of status (2xx ...; none: no answer was begun).",
    ("method", "route", "status"),
)
HTTP_REQUEST_SECONDS = Metric(
    "shoal_http_request_seconds",
    Kind.HISTOGRAM,
    "Seconds per request by method and route template, without streams and long polls: they last as clients wish.",
    ("method", "route"),
    _FAST,
)
HTTP_REFUSED = Metric(
    "shoal_http_refused_total",
    Kind.COUNTER,
    "Requests refused by this process with 429, or 413 for their size, by limit; failures: tokens that were not valid.",
    ("limit",),
)
HTTP_STREAMS = Metric(
    "shoal_http_streams", Kind.GAUGE, "Streams that clients have open: server-sent events and followed logs."
)
