"""How a supervisor grows with the number of its workers when they are real actors of Ray.

    python bench/scale/ray_actors.py [--workers 16,32,64] [--nodes 4] [--train-s 10] [--kills 3]
                                     [--agents-from 0] [--out build/ray-actors.json]

The shipped supervisor, journal, calls over Ray and control plane's store, on a cluster of `--nodes` raylets; the
workers are the shipped actors with an engine that only answers (bench/scale/thin_actors.py), so dozens of them fit on
one machine. For each number: seconds and the supervisor's CPU seconds until every worker has got `run`; its CPU seconds
for each second of training; seconds from the SIGKILL of a worker until the last `run` of the next group has arrived;
memory. The exponents say how each of these grows: 1 is linear. The exit status is 1 if a healthy worker was evicted or
a node suspected.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from kit.processes.os_processes import adopt_orphans, end_all
from measurements.machine import describe
from scale.growth import print_growth
from shoal_service.cluster.embedded_cluster import EmbeddedCluster

FIGURES = {
    "start_s": "start, s",
    "start_cpu_s": "start, CPU s of the supervisor",
    "train_cpu_share": "training, CPU s of the supervisor per s",
    "kill_s": "kill -> last run, s: median",
    "kill_max_s": "most",
    "kill_cpu_s": "CPU s of the supervisor in it",
    "evicted": "healthy workers evicted",
    "suspected": "nodes suspected",
    "supervisor_mib": "memory of the supervisor, MiB",
    "worker_mib": "memory of a worker, MiB",
    "load": "highest load",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="16,32,64", help="numbers of workers (16,32,64)")
    parser.add_argument("--nodes", type=int, default=4, help="raylets beside the head (4)")
    parser.add_argument("--train-s", type=float, default=10.0, help="seconds of undisturbed training (10)")
    parser.add_argument("--kills", type=int, default=3, help="for each number (3)")
    parser.add_argument("--agents-from", type=int, default=0, help="workers from which on agents poll; 0: never (0)")
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up like Ctrl-C
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="shoal-actors-", ignore_cleanup_errors=True) as folder:
        largest = max(map(int, arguments.workers.split(",")))
        num_cpus = (-(-largest // arguments.nodes) + 1) * arguments.nodes
        cluster = EmbeddedCluster(Path(folder) / "state", num_cpus=num_cpus, num_nodes=arguments.nodes)
        try:
            rows = _rows(cluster, folder, arguments)
        finally:
            cluster.stop()
            end_all()
    print_growth(rows, FIGURES)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    sys.exit(1 if any(row["evicted"] or row["suspected"] for row in rows) else 0)


def _rows(cluster: EmbeddedCluster, folder: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures in a process of its own, because Ray reads the cluster's environment when it is imported."""
    address = cluster.start()
    script = str(Path(__file__).with_name("ray_attempt.py"))
    options = [arguments.nodes, arguments.workers, arguments.train_s, arguments.kills, arguments.agents_from]
    driver = subprocess.Popen(
        [sys.executable, script, address, folder, *map(str, options)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **cluster.environment},
    )
    assert driver.stdout is not None
    rows: list[dict[str, Any]] = []
    for line in driver.stdout:
        if not line.startswith("{"):
            continue  # Ray prints that a worker was killed, and the raylets' logs
        rows.append(json.loads(line))
        print(", ".join(f"{key} {value:.3g}" for key, value in rows[-1].items()), flush=True)
    if driver.wait() != 0:
        raise SystemExit(f"{script} ended with {driver.returncode}")
    return rows


if __name__ == "__main__":
    main()
