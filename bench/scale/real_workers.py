"""One killed worker among many real ones: seconds without training, healthy workers evicted, nodes suspected.

    python bench/scale/real_workers.py [--workers 4,16,32,48] [--kills 5] [--nodes 4] [--out build/real-workers.json]

For each number of workers: a real `shoal serve`, a cluster of `--nodes` raylets and a job of a tiny language model in
which each rank has one micro-batch. Each kill is a SIGKILL of a random worker while all of them train; the next one
waits until the job has grown back, and strikes another node, because three deaths on one node would isolate it.
Everything shares the cores of this machine, so 32 workers on 2 cores measure the load as well as Shoal. The exit status
is 1 if a healthy worker was evicted or a node suspected.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from kit.processes.os_processes import adopt_orphans, end_all, send
from measurements.machine import describe
from shoal_api.client import Client
from shoal_server import ShoalServer
from shoal_service.views import IncidentView, WorkerView

_PATIENCE_S = 240.0
_LOOK_S = 0.1
_SETTLED_STEPS = 3
_PHASES = ("detect_s", "quiesce_s", "plan_s", "form_s", "restore_s", "first_step_s")
_SUSPECTS = ("node.silent", "node.suspected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4,16,32,48", help="numbers of workers (4,16,32,48)")
    parser.add_argument("--kills", type=int, default=5, help="for each number (5)")
    parser.add_argument("--nodes", type=int, default=4, help="raylets beside the head (4)")
    parser.add_argument("--seed", type=int, default=1, help="chooses the victims")
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    adopt_orphans()
    rows = []
    phases = " ".join(f"{phase[:-2]:>10}" for phase in _PHASES)
    print(f"{'workers':>7} {'kill':>4} {'pause':>6}   {phases}    step   (seconds)", flush=True)
    try:
        for number in map(int, arguments.workers.split(",")):
            rows.append(_measure(number, arguments.nodes, arguments.kills, random.Random(arguments.seed)))
    finally:
        end_all()
    print("\n| workers | start, s | step, s | pause, s: median | most | evicted | suspected | highest load |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        pauses = [kill["pause_s"] for kill in row["kills"]]
        print(
            f"| {row['workers']} | {row['start_s']:.1f} | {row['step_s']:.2f} | {statistics.median(pauses):.2f} | "
            f"{max(pauses):.2f} | {row['evicted']} | {len(row['suspected'])} | {row['load']:.0f} |"
        )
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    sys.exit(1 if any(row["evicted"] or row["suspected"] for row in rows) else 0)


def _measure(num_workers: int, num_nodes: int, num_kills: int, chance: random.Random) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shoal-real-", ignore_cleanup_errors=True) as folder:
        server = ShoalServer(Path(folder), [f"--num-cpus={num_workers}", f"--nodes={num_nodes}"])
        try:
            server.start()
            server.wait_for_cpus(num_workers // num_nodes * num_nodes)
            with server.client as client:
                return _kill(Job(client, num_workers), num_kills, chance)
        finally:
            server.end()


class Job:
    def __init__(self, client: Client, num_workers: int) -> None:
        self.client, self.num_workers = client, num_workers
        self.id = client.submit(_spec(num_workers)).id

    def workers(self) -> list[WorkerView]:
        return [worker for worker in self.client.workers(self.id) if worker.rank is not None]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := condition()):
            status = self.client.job(self.id).status
            assert not status.state.ended, f"the job ended before {what}: {status}"
            assert time.monotonic() < deadline, f"{what}: not within {_PATIENCE_S:g} s; {status}"
            time.sleep(_LOOK_S)
        return found

    def settle(self) -> float:
        """Waits until all workers have trained a few steps as one group. Returns median seconds of these steps."""
        begun = self.client.job(self.id).status.step

        def recent() -> list[float]:
            last = self.client.series(self.id, after_step=begun)[-_SETTLED_STEPS:]
            is_whole = len(last) == _SETTLED_STEPS and all(p.world_size == self.num_workers for p in last)
            return [p.step_s for p in last] if is_whole and len({p.generation for p in last}) == 1 else []

        return statistics.median(self.until(recent, f"{self.num_workers} workers train"))

    def recovered(self, known: int) -> IncidentView | None:
        """Waits until no incident is open and there are more than `known` of them. Returns the newest one."""
        incidents = self.client.incidents(self.id)
        return incidents[-1] if len(incidents) > known and all(incident.closed for incident in incidents) else None


def _kill(job: Job, num_kills: int, chance: random.Random) -> dict[str, Any]:
    started = time.monotonic()
    job.settle()
    row: dict[str, Any] = {"workers": job.num_workers, "start_s": time.monotonic() - started, "kills": []}
    steps, evicted, load = [], 0, 0.0
    struck: Counter[str | None] = Counter()
    for number in range(num_kills):
        steps.append(job.settle())
        known, before = len(job.client.incidents(job.id)), job.workers()
        least = min(struck[worker.node_id] for worker in before)
        victim = chance.choice([worker for worker in before if struck[worker.node_id] == least])
        struck[victim.node_id] += 1
        at = send(victim.pid, signal.SIGKILL)
        incident = job.until(lambda: job.recovered(known), "the incident is closed")  # noqa: B023
        job.until(lambda: len(job.workers()) == job.num_workers, "the job has grown back")
        remaining = {worker.worker_id for worker in job.workers()}
        gone = {worker.worker_id for worker in before} - remaining - {victim.worker_id}
        evicted, load = evicted + len(gone), max(load, os.getloadavg()[0])
        pause_s = incident.at + (incident.recovery_s or 0.0) - at
        row["kills"].append({"pause_s": pause_s, **{phase: getattr(incident, phase) for phase in _PHASES}})
        phases = " ".join(f"{getattr(incident, phase) or 0.0:10.2f}" for phase in _PHASES)
        print(f"{job.num_workers:7} {number + 1:4} {pause_s:6.2f}   {phases} {steps[-1]:7.2f}", flush=True)
    events = list(job.client.events(job.id))
    suspected = [event.message for event in events if event.type in _SUSPECTS]
    suspected += [f"{node.ip} is dead" for node in job.client.nodes() if not node.alive]
    job.client.cancel(job.id)
    job.client.wait(job.id, timeout_s=_PATIENCE_S)
    return row | {"step_s": statistics.median(steps), "evicted": evicted, "suspected": suspected, "load": load}


def _spec(num_workers: int) -> dict[str, Any]:
    return {
        "name": "real-workers",
        "model": {"dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 32},
        "data": {"corpus": "python-stdlib"},
        "batch": {"global_size": num_workers, "micro_size": 1},
        "stop": {"steps": 10_000_000},
        "checkpoint": {"every_steps": 1_000},
        "validation": {"samples": 0},
        "elasticity": {"min_workers": 1, "max_workers": num_workers},
        "parallelism": {"dp_shard": "auto"},
        "retry": {"max_recoveries": 1_000_000},
    }


if __name__ == "__main__":
    main()
