"""Many open pages of one job that trains: from a worker's report of a step to the last client, and what it costs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from api.pages import Pages
from kit.processes.os_processes import cpu_seconds
from kit.processes.server import until
from kit.worlds.tiny_jobs import submit_tiny
from shoal_server import ShoalServer, serving

_STEP_S = 0.2
_SECONDS = 30.0


def measure(folder: Path, *, pages: int) -> dict[str, Any]:
    gate = folder / "gate"
    gate.mkdir()
    with serving(folder / "state", num_cpus=2) as server, server.client as client:
        run = submit_tiny(client, gate, dict, workers=2, min_workers=2, steps=1_000_000, step_s=_STEP_S)
        until(lambda: client.job(run.id).status.step >= 5, "the job trains", 300)
        alone = _cpu_share(server, 10.0)
        clients = Pages(server.port, server.token, run.id, pages)
        found = asyncio.run(clients.follow(server.pid, _SECONDS))
        client.cancel(run.id)
        client.wait(run.id, timeout_s=120)
    found |= {"pages": pages, "cpu_share_without_pages": round(alone, 3)}
    print(
        f"{pages} pages of one job, a step each {_STEP_S} s: from a report to the last page p50 "
        f"{found['stream_p50_ms']} ms, p99 {found['stream_p99_ms']} ms of {found['stream_steps']} steps; control plane "
        f"{found['cpu_share']:.0%} of a core, {alone:.0%} without pages"
    )
    return found


def _cpu_share(server: ShoalServer, seconds: float) -> float:
    before = cpu_seconds(server.pid)
    time.sleep(seconds)
    return (cpu_seconds(server.pid) - before) / seconds
