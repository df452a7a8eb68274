"""Is a busy host taken for a dead one? Busy processes compete with a job of four workers on a cluster of four nodes.

    python bench/busy_host.py [--minutes 3] [--processes 20] [--out build/busy-host.json]

Prints every incident, and every node that was suspected or declared dead: both are false, since nothing fails. The exit
status is 1 if there was one of either.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("bench", "tests", "tools"))

from kit.processes.os_processes import adopt_orphans, end_all
from measurements.machine import describe
from shoal_api.client import Client
from shoal_server import ShoalServer
from shoal_workers.contract.job import JobState

_NUM_NODES = 4
_PATIENCE_S = 180.0
_SPEC = {
    "name": "busy-host",
    "model": {"dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 32},
    "data": {"corpus": "python-stdlib"},
    "batch": {"global_size": 8, "micro_size": 2},
    "stop": {"steps": 10_000_000},
    "checkpoint": {"every_steps": 500},
    "validation": {"samples": 0},
    "elasticity": {"min_workers": 1, "max_workers": _NUM_NODES},
    "retry": {"max_recoveries": 1_000_000},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--processes", type=int, default=20, help="busy processes beside the job (20)")
    parser.add_argument("--out", type=Path, help="append the result to this file, as a line of JSON")
    arguments = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="shoal-busy-", ignore_cleanup_errors=True) as folder:
        server = ShoalServer(Path(folder) / "state", [f"--num-cpus={_NUM_NODES}", f"--nodes={_NUM_NODES}"])
        busy: list[subprocess.Popen[bytes]] = []
        try:
            server.start()
            server.wait_for_cpus(_NUM_NODES)
            with server.client as client:
                result = _measure(client, busy, arguments.minutes, arguments.processes)
        finally:
            for process in busy:
                process.kill()
            server.end()
            end_all()
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
    sys.exit(1 if result["dead_nodes"] or result["suspected_nodes"] else 0)


def _measure(client: Client, busy: list[subprocess.Popen[bytes]], minutes: float, num_busy: int) -> dict[str, object]:
    job = client.submit(_SPEC)
    started = time.monotonic()
    while client.job(job.id).status.step < 20:
        assert time.monotonic() - started < _PATIENCE_S, f"the job does not train: {client.job(job.id).status}"
        time.sleep(0.5)
    busy.extend(subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy))
    began, first = time.monotonic(), client.job(job.id).status.step
    dead: set[str] = set()
    load = 0.0
    while time.monotonic() - began < 60 * minutes:
        time.sleep(1.0)
        dead |= {node.ip for node in client.nodes() if not node.alive}
        load = max(load, os.getloadavg()[0])
    status = client.job(job.id).status
    incidents = client.incidents(job.id)
    client.cancel(job.id)
    while client.job(job.id).status.state is not JobState.CANCELLED:
        time.sleep(0.5)
    silent = [event.message for event in client.events(job.id) if event.type == "node.silent"]
    return {
        "machine": describe(),
        "minutes": minutes,
        "busy_processes": num_busy,
        "highest_load": load,
        "steps": status.step - first,
        "dead_nodes": sorted(dead),
        "suspected_nodes": silent,
        "incidents": [f"{incident.cause}: {incident.message}" for incident in incidents],
        "steps_lost": status.steps_lost,
    }


if __name__ == "__main__":
    main()
