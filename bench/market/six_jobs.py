"""Six tiny jobs of two projects on 8 logical CPUs of four Ray nodes: they arrive, finish, are shrunk and preempted, and
a node is lost. Does every job end with the losses of its undisturbed run, and how soon does an urgent job train?

    python bench/market/six_jobs.py [--minutes 10] [--out build/six-jobs.json]

Prints a line per job. The exit status is 1 if a loss differs, a move cost a step, or the urgent job took more than 3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside these folders.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from kit.processes.os_processes import adopt_orphans, end_all
from kit.worlds.tiny_jobs import Run, submit_tiny
from market.phases import start_phases
from measurements.machine import describe
from shoal_api.client import Client
from shoal_server import ShoalServer
from shoal_service.fleet_views import ProjectRules
from shoal_workers.contract.job import JobState

_NUM_NODES, _NUM_CPUS = 4, 8
_STEP_S = 0.2
_URGENT_S = 3.0
_EVERY_STEP = 20_000
"""More points than any job has steps, so none is a mean of several."""
_CLOSE = 1e-5
"""Relative difference of losses: sums over other numbers of ranks have another order."""


@dataclass(frozen=True)
class Planned:
    """A job: when it arrives and how long it trains, as shares of the whole duration."""

    name: str
    project: str
    at: float
    length: float
    min_workers: int
    max_workers: int
    priority: int = 0


JOBS = (
    Planned("first", "vision", 0.0, 0.7, 1, 8),
    Planned("second", "text", 0.1, 0.4, 1, 8),
    Planned("third", "vision", 0.2, 0.3, 4, 6),
    Planned("fourth", "text", 0.3, 0.3, 1, 2),
    Planned("urgent", "text", 0.45, 0.1, 4, 8, priority=50),
    Planned("sixth", "vision", 0.6, 0.15, 2, 4, priority=10),
)
_NODE_LOST_AT = 0.75


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="append the result to this file, as a line of JSON")
    arguments = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="shoal-six-", ignore_cleanup_errors=True) as folder:
        options = [f"--num-cpus={_NUM_CPUS}", f"--nodes={_NUM_NODES}", "--leave-dead-nodes"]
        server = ShoalServer(Path(folder) / "state", options)
        try:
            server.start()
            server.wait_for_cpus(_NUM_CPUS)
            with server.client as client:
                result = _measure(client, server, Path(folder), 60 * arguments.minutes)
        finally:
            server.end()
            end_all()
    for job in result["jobs"]:
        print(json.dumps(job))
    print(f"urgent job, seconds after submit: {json.dumps(result['urgent_phases'])}, load {result['urgent_load']:.1f}")
    print(f"urgent job: first step {result['urgent_s']:.2f} s after submit; nothing wrong: {result['is_sound']}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
    sys.exit(0 if result["is_sound"] and result["urgent_s"] <= _URGENT_S else 1)


def _measure(client: Client, server: ShoalServer, folder: Path, duration_s: float) -> dict[str, Any]:
    for name, weight in (("vision", 1.0), ("text", 2.0)):
        client.set_project(name, ProjectRules(weight=weight))
    reference = _undisturbed(client, folder, max(_steps(job, duration_s) for job in JOBS))
    runs: dict[str, Run] = {}
    loads: dict[str, float] = {}
    began = time.monotonic()
    pending, is_whole = list(JOBS), True
    while pending or is_whole:
        passed = (time.monotonic() - began) / duration_s
        if pending and passed >= pending[0].at:
            planned = pending.pop(0)
            loads[planned.name] = os.getloadavg()[0]
            runs[planned.name] = _submit(client, folder, planned, duration_s)
        if is_whole and passed >= _NODE_LOST_AT:
            server.nodes.kill_raylet(server.nodes.ips()[-1])
            is_whole = False
        time.sleep(0.05)
    jobs = [_result(client, runs[planned.name], planned, reference) for planned in JOBS]
    urgent = runs["urgent"]
    return {
        "machine": describe(),
        "seconds": round(time.monotonic() - began),
        "jobs": jobs,
        "urgent_phases": start_phases(
            client.job(urgent.id),
            list(client.events(urgent.id)),
            client.series(urgent.id),
            [list(client.events(run.id)) for run in runs.values() if run is not urgent],
        ),
        "urgent_load": loads["urgent"],
        "urgent_s": next(job["first_step_s"] for job in jobs if job["name"] == "urgent"),
        "is_sound": all(job["state"] == "SUCCEEDED" and job["is_equal"] and not job["lost_by_moves"] for job in jobs),
    }


def _steps(planned: Planned, duration_s: float) -> int:
    return max(5, int(planned.length * duration_s / _STEP_S))


def _undisturbed(client: Client, folder: Path, steps: int) -> dict[int, float]:
    """Its learning rate is constant, so shorter runs are a prefix of it."""
    gate = folder / "undisturbed"
    gate.mkdir()
    run = submit_tiny(client, gate, dict, workers=1, steps=steps, batch={"global_size": 8, "micro_size": 1})
    client.wait(run.id, until=[JobState.SUCCEEDED], timeout_s=600.0)
    return _losses(client, run.id)


def _submit(client: Client, folder: Path, planned: Planned, duration_s: float) -> Run:
    gate = folder / planned.name
    gate.mkdir()
    return submit_tiny(
        client,
        gate,
        dict,
        workers=planned.max_workers,
        min_workers=planned.min_workers,
        steps=_steps(planned, duration_s),
        step_s=_STEP_S,
        waves=[1],
        batch={"global_size": 8, "micro_size": 1},
        name=planned.name,
        project=planned.project,
        priority=planned.priority,
    )


def _result(client: Client, run: Run, planned: Planned, reference: dict[int, float]) -> dict[str, Any]:
    job = client.wait(run.id, timeout_s=1800.0)
    events = list(client.events(run.id))
    losses = _losses(client, run.id)
    stop = job.spec.stop
    assert stop is not None and stop.steps is not None
    is_equal = list(losses) == list(range(1, stop.steps + 1)) and all(
        abs(loss - reference[step]) <= _CLOSE * abs(reference[step]) + 1e-6 for step, loss in losses.items()
    )
    lost_in_incidents = sum(incident.steps_lost or 0 for incident in client.incidents(run.id))
    return {
        "name": planned.name,
        "project": planned.project,
        "state": str(job.status.state),
        "steps": job.status.step,
        "is_equal": is_equal,
        "first_step_s": round(client.series(run.id)[0].at - job.created_at, 2),
        "seconds": round((job.ended_at or time.time()) - job.created_at, 1),
        "moves": sum(event.type == "job.granted" for event in events),
        "preemptions": sum(event.type == "job.preempted" for event in events),
        "world_sizes": [event.data["workers"] for event in events if event.type == "generation.formed"],
        "steps_lost": job.status.steps_lost,
        "lost_by_moves": job.status.steps_lost - lost_in_incidents,
    }


def _losses(client: Client, job_id: str) -> dict[int, float]:
    return {point.step: point.loss for point in client.series(job_id, max_points=_EVERY_STEP)}


if __name__ == "__main__":
    main()
