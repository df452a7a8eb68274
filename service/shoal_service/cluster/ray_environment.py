"""What Shoal asks of Ray's processes, as environment variables: for the head, every node and every driver of a cluster.

`shoal serve` sets them for the cluster that it starts; docs/ray-cluster.md says what each is for, and deploy/ray.env is
the same list for clusters that are started otherwise (a test compares the two). Ray reads them once, when it starts.
"""

from __future__ import annotations

CLUSTER_ENVIRONMENT = {
    # A dead node is seen after 3 refused probes (0.6-0.9 s); one that was cut off, after 3 that time out (2.1-2.4 s).
    # A raylet that is merely starved must answer none of three in a row before it is taken for dead.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    # Nodes, drivers and actors wait so long for a head that is away, before they end themselves. Ray's default: 60 s.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    # A process that does not hear Ray's kill (it is stopped) is ended by SIGKILL after so long. Ray's default: 5000.
    "RAY_kill_worker_timeout_milliseconds": "500",
    # Ray runs its workers at niceness 15, and whatever else the machine does would come before the training.
    "RAY_worker_niceness": "0",
}
