"""CPU seconds of all workers while a group that has lost one forms again: building, restore, first step, later steps.

    python bench/group/reforming.py [--workers 8,16,32] [--kills 3] [--nodes 1] [--out build/reforming.json]

Worker processes without Ray, driven as a supervisor drives them, train a tiny language model; each rank has one
micro-batch. Each kill is a SIGKILL of a worker in the middle; the others are interrupted and form the next group from
the snapshot in memory. With one node all parts are in the same shared memory; with more, ranks read each other's parts
over TCP. On few cores the seconds of a pause are the CPU seconds of all workers divided by the cores, and CPU seconds
depend less on what else runs than the pause itself. Medians over the kills.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from kit.processes.fleet import Fleet, Job, RemoteWorker
from measurements.machine import describe
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.messages import Phase

_STEPS = 4
_COLUMNS = ("forming", "building", "restoring", "first step", "later step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,16,32", help="numbers of workers (8,16,32)")
    parser.add_argument("--kills", type=int, default=3, help="for each number (3)")
    parser.add_argument("--nodes", type=int, default=1, help="shared memories (1)")
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    rows = []
    print("CPU seconds of all workers\n| workers | " + " | ".join(_COLUMNS) + " |")
    print("|---" * (len(_COLUMNS) + 1) + "|", flush=True)
    for number in map(int, arguments.workers.split(",")):
        with tempfile.TemporaryDirectory(prefix="shoal-reforming-", dir="/dev/shm") as folder:
            fleet = Fleet(Path(folder))
            try:
                row = _measure(fleet, Path(folder), number, arguments.nodes, arguments.kills)
            finally:
                fleet.close()
        rows.append({"workers": number, "nodes": arguments.nodes, **row})
        print(f"| {number} | " + " | ".join(f"{row[name]:.2f}" for name in _COLUMNS) + " |", flush=True)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


def _measure(fleet: Fleet, folder: Path, num_workers: int, num_nodes: int, num_kills: int) -> dict[str, float]:
    (folder / "memory").mkdir()
    job = Job(fleet, _spec(num_workers), folder / "checkpoints", folder / "memory")
    group = [job.workers(1, node_id=f"n{number % num_nodes}")[0] for number in range(num_workers)]
    _report_after(group, _STEPS)
    job.start(group)
    _wait(group)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_kills):
        group.pop(len(group) // 2).kill(signal.SIGKILL)
        exits = job.interrupt(group)
        source = job.in_memory(exits, group)
        _report_after(group, source.step + _STEPS)
        job.start(group, restore_snapshot=source, is_recovery=True)
        _wait(group)
        cpu_s: dict[str, float] = defaultdict(float)
        for worker in group:
            for phase, seconds in _phases(worker.call("cpu_marks"), source.step).items():
                cpu_s[phase] += seconds
        for phase, seconds in cpu_s.items():
            found[phase].append(seconds)
    return {phase: statistics.median(values) for phase, values in found.items()}


def _report_after(group: list[RemoteWorker], step: int) -> None:
    for worker in group:
        worker.strike(Phase.FORWARD, step, "report")


def _wait(group: list[RemoteWorker]) -> None:
    for worker in group:
        worker.reached()


def _phases(marks: list[tuple[str, int, float]], start_step: int) -> dict[str, float]:
    """CPU seconds of one worker, by column."""
    at: dict[tuple[str, int], float] = {}
    for phase, step, cpu_s in marks:
        at.setdefault((phase, step), cpu_s)
    steps = [at[Phase.FORWARD, start_step + number] for number in range(_STEPS + 1)]
    entered = [at[phase, 0] for phase in (Phase.FORMING, Phase.BUILDING, Phase.RESTORING)]
    forming, building, restoring = (b - a for a, b in zip(entered, [*entered[1:], steps[0]], strict=True))
    later = (steps[-1] - steps[1]) / (_STEPS - 1)
    return dict(zip(_COLUMNS, (forming, building, restoring, steps[1] - steps[0], later), strict=True))


def _spec(num_workers: int) -> dict[str, Any]:
    return {
        "task": LM_TASK,
        "name": "reforming",
        "model": {"dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 32},
        "data": {"corpus": "python-stdlib"},
        "batch": {"global_size": num_workers, "micro_size": 1},
        "stop": {"steps": 10_000_000},
        "checkpoint": {"every_steps": 1_000_000},
        "validation": {"samples": 0},
        "elasticity": {"min_workers": 1, "max_workers": num_workers},
    }


if __name__ == "__main__":
    main()
