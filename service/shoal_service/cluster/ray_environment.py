"""Ray's settings for Shoal, as environment variables: for the head, every node and every driver of a cluster.

`shoal serve` sets them for the cluster that it starts. docs/ray-cluster.md explains each one. deploy/ray.env is the
same list for clusters that are started in another way (a test compares the two). Ray reads them once, when it starts.
"""

from __future__ import annotations

CLUSTER_ENVIRONMENT = {
    # A dead node is detected after 3 refused probes (0.6-0.9 s), a node that was cut off after 3 timeouts (2.1-2.4 s).
    # A starved raylet is declared dead only if it answers none of three probes in a row.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    # Nodes, drivers and actors end themselves if the head is away for this long. Ray's default: 60 s.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    # A process that does not react to Ray's kill (it is stopped) is ended by SIGKILL after this time. Default: 5000.
    "RAY_kill_worker_timeout_milliseconds": "500",
    # Ray's default is niceness 15, with which every other program of the machine would run before the training.
    "RAY_worker_niceness": "0",
}
