"""From a submission to the first completed step of a small job, on a real server with its embedded cluster.

The first job of a server also starts its node's fork server, so it counts apart. The step's time is that of rank 0.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from kit.processes.server import until
from kit.worlds.tiny_jobs import submit_tiny
from shoal_api.client import Client
from shoal_server import serving


def measure(folder: Path, *, trials: int) -> dict[str, Any]:
    times_s = []
    with serving(folder / "state", num_cpus=2) as server, server.client as client:
        for number in range(trials + 1):
            gate = folder / f"gate-{number}"
            gate.mkdir()
            begun_at = time.time()
            run = submit_tiny(client, gate, dict, workers=1, min_workers=1, steps=1_000_000, step_s=0.05)
            until(partial(_has_trained, client, run.id), "the job trains", 300)
            times_s.append(client.series(run.id)[0].at - begun_at)
            client.cancel(run.id)
            client.wait(run.id, timeout_s=120)
    first_s, rest_s = times_s[0], times_s[1:]
    print(
        f"from a submission to the first step of one worker: p50 {statistics.median(rest_s):.2f} s, worst "
        f"{max(rest_s):.2f} s of {trials}; the first job of the server {first_s:.2f} s"
    )
    return {
        "first_step_p50_s": round(statistics.median(rest_s), 2),
        "first_step_max_s": round(max(rest_s), 2),
        "first_step_cold_s": round(first_s, 2),
    }


def _has_trained(client: Client, job_id: str) -> bool:
    return client.job(job_id).status.step >= 1
