"""Where the time goes between the submission of an urgent job on a full cluster and the end of its first step.

    python bench/market/urgent_start.py [--starts 5] [--cases shrink,preempt] [--out build/urgent.json]

Two cases on 8 logical CPUs of four Ray nodes: `shrink`, a job with 8 workers gives some of them back; `preempt`, two
jobs cannot give enough, and one of them is preempted, so it saves and ends first. After each start all jobs end. Prints
the moments of each start, in seconds after its submission, the seconds of processor time that the machine was busy, and
the medians. The exit status is 1 if a median is above 3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside these folders.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from kit.processes.os_processes import adopt_orphans, end_all
from kit.processes.server import until
from kit.worlds.tiny_jobs import Run, submit_tiny
from market.phases import start_phases
from measurements.machine import describe
from shoal_api.client import Client
from shoal_server import ShoalServer
from shoal_workers.contract.job import JobState

_NUM_NODES, _NUM_CPUS = 4, 8
_STEP_S = 0.2
_URGENT_WORKERS, _URGENT_STEPS = 4, 10
_LIMIT_S = 3.0
_ENDLESS = 1_000_000


@dataclass(frozen=True)
class Holder:
    """A job that holds workers: the least and the most."""

    min_workers: int
    max_workers: int


CASES = {"shrink": (Holder(1, 8),), "preempt": (Holder(4, 4), Holder(2, 4))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="of each case")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path, help="append the result to this file, as a line of JSON")
    arguments = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="shoal-urgent-", ignore_cleanup_errors=True) as folder:
        server = ShoalServer(Path(folder) / "state", [f"--num-cpus={_NUM_CPUS}", f"--nodes={_NUM_NODES}"])
        try:
            server.start()
            server.wait_for_cpus(_NUM_CPUS)
            with server.client as client:
                found = {
                    case: _measure(client, Path(folder) / case, CASES[case], arguments.starts)
                    for case in arguments.cases.split(",")
                }
        finally:
            server.end()
            end_all()
    for case, starts in found.items():
        print(f"{case}: medians {json.dumps(_medians(starts))}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("a") as file:
            file.write(json.dumps({"machine": describe(), "starts": found}) + "\n")
    sys.exit(0 if all(_medians(starts)["first_step_s"] <= _LIMIT_S for starts in found.values()) else 1)


def _measure(client: Client, folder: Path, holders: tuple[Holder, ...], num_starts: int) -> list[dict[str, float]]:
    """Measures starts. The holders are new jobs each time: one that was made smaller trains about as fast on these
    cores, and then the policy leaves it as it is."""
    folder.mkdir()
    starts = []
    for number in range(num_starts + 1):
        runs = [
            _submit(client, folder / f"holder-{number}-{at}", one.min_workers, one.max_workers)
            for at, one in enumerate(holders)
        ]
        for run, holder in zip(runs, holders, strict=True):
            until(lambda: _is_whole(run, holder), "the cluster is full", 600.0)  # noqa: B023
        start = _start(client, folder / f"urgent-{number}", runs)
        print(json.dumps(start), flush=True)
        if number:  # the first one starts the fork servers
            starts.append(start)
        for run in runs:
            client.cancel(run.id)
            client.wait(run.id, timeout_s=120.0)
    return starts


def _start(client: Client, folder: Path, others: list[Run]) -> dict[str, float]:
    busy_before, load = _busy_s(), os.getloadavg()[0]
    run = _submit(client, folder, _URGENT_WORKERS, _URGENT_WORKERS, steps=_URGENT_STEPS, priority=50, name="urgent")
    until(lambda: run.now().status.step >= 1, "the urgent job trains")
    busy = _busy_s() - busy_before
    job = client.wait(run.id, until=[JobState.SUCCEEDED], timeout_s=120.0)
    histories = [list(client.events(one.id)) for one in others]
    phases = start_phases(job, list(client.events(run.id)), client.series(run.id), histories)
    return {**phases, "busy_s": round(busy, 2), "load": round(load, 2)}


def _is_whole(run: Run, holder: Holder) -> bool:
    """Whether the job trains with its most workers, for some steps already."""
    status = run.now().status
    if status.state is not JobState.RUNNING or status.workers != holder.max_workers:
        return False
    formed = run.events("generation.formed")[-1]
    return time.time() - formed.at > 3.0


def _busy_s() -> float:
    """Processor time of the whole machine so far, without what was idle."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return float(user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _medians(starts: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for start in starts for name in start)
    return {name: round(statistics.median(s[name] for s in starts if name in s), 2) for name in names}


def _submit(client: Client, gate: Path, min_workers: int, max_workers: int, steps: int = _ENDLESS, **spec: Any) -> Run:
    gate.mkdir()
    return submit_tiny(
        client,
        gate,
        dict,
        workers=max_workers,
        min_workers=min_workers,
        steps=steps,
        step_s=_STEP_S,
        waves=[1],
        batch={"global_size": 8, "micro_size": 1},
        **spec,
    )


if __name__ == "__main__":
    main()
