"""Ray's settings for Shoal, and what other processes inherit of the server's environment.

`shoal serve` sets CLUSTER_ENVIRONMENT for the head, every node and every driver of the cluster that it starts.
docs/ray-cluster.md explains each one. deploy/ray.env is the same list for clusters that are started in another way (a
test compares the two). Ray reads them once, when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

CLUSTER_ENVIRONMENT = {
    # Ray's verdict is final, so it is slow: 4 probes in a row fail, 3 s each and 0.5 s apart. That is 12-13.5 s for a
    # node that was cut off, and 1.5-2 s for a raylet that has ended (its host refuses). Shoal's own probes are fast and
    # take back what was wrong: see core/reachability.py.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
    # Nodes, drivers and actors end themselves if the head is away for this long. Ray's default: 60 s.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    # A process that does not react to Ray's kill (it is stopped) is ended by SIGKILL after this time. Default: 5000.
    "RAY_kill_worker_timeout_milliseconds": "500",
    # Ray's default is niceness 15, with which every other program of the machine would run before the training.
    "RAY_worker_niceness": "0",
    # Processes that a node starts at the same time. Ray's default, the number of its CPUs, is meant for new
    # interpreters; Shoal's processes are forked, and those of one group wait for each other.
    "RAY_worker_maximum_startup_concurrency": "16",
    # Ray would start an interpreter for each CPU in advance; Shoal's processes have settings of their own, so they
    # never use one.
    "RAY_prestart_worker_first_driver": "false",
    # Without a limit Ray never rotates what a worker prints. Per worker and stream: 16 MiB, and three older files.
    "RAY_ROTATION_MAX_BYTES": str(16 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "3",
}

RAY_ACCESS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""The token of a cluster, and where it is."""
_SERVER_PREFIXES = ("SHOAL_", "PG")
"""Settings of the server, and of libpq: host, user and password of its database."""
_CREDENTIALS = frozenset({"CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"})
"""Variables that systemd gives to a service alone."""
_DATABASE = re.compile(r"\b(?:postgres(?:ql)?|mysql|mariadb|sqlite|oracle|mssql)(?:\+\w+)?://", re.IGNORECASE)


def inherit_environment(environment: Mapping[str, str], *, keep_ray_access: bool = False) -> dict[str, str]:
    """Return the part of the server's environment that another process may have.

    The code of a job can read its environment. It gets no settings of Shoal and of the database, no value with a
    database URL in it, no credentials of systemd, and the token of a Ray cluster only with `keep_ray_access`.
    """
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_SERVER_PREFIXES)
        and name not in _CREDENTIALS
        and (keep_ray_access or name not in RAY_ACCESS)
        and not _DATABASE.search(value)
    }
