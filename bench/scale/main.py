"""How the work of a supervisor grows with the number of its workers.

    python bench/scale/main.py [--workers 64,256,1024,4096] [--train-s 10] [--kills 3] [--out build/scale.json]

The shipped supervisor with workers that only answer (bench/scale/world.py). For each number of workers: seconds and CPU
seconds until every worker has got `run`; CPU seconds for each second of training, and seconds of one turn; seconds from
the death of a worker, and of 1 % of the nodes, until the last worker has got `run` of the next group; bytes of the
journal; memory. The exponents say how each of these grows: 1 is linear.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from measurements.machine import describe
from scale.control_plane import ControlPlane
from scale.growth import print_growth
from scale.world import ScaleWorld

FIGURES = {
    "start_s": "start, s",
    "start_cpu_s": "start, CPU s",
    "train_cpu_share": "training, CPU s per s",
    "events_per_s": "events per s",
    "cpu_per_event_ms": "CPU per event, ms",
    "turn_p50_ms": "turn p50, ms",
    "turn_p99_ms": "turn p99, ms",
    "kill_s": "one kill -> last run, s",
    "kill_turn_p99_ms": "turn p99 in a kill, ms",
    "nodes_s": "1 % of nodes -> last run, s",
    "journal_bytes": "journal entry, bytes",
    "journal_writes": "records per kill",
    "journal_kill_bytes": "bytes of these",
    "journal_event_bytes": "journal, bytes per event",
    "store_p50_ms": "control plane: reports stored, p50 ms",
    "memory_mib": "memory, MiB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="64,256,1024,4096", help="numbers of workers")
    parser.add_argument("--train-s", type=float, default=10.0, help="seconds of undisturbed training")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(asyncio.run(_measure(arguments.one, arguments.train_s, arguments.kills))))
        return
    rows = []
    for number in (int(text) for text in arguments.workers.split(",")):
        print(f"{number} workers ...", flush=True)
        options = [f"--one={number}", f"--train-s={arguments.train_s}", f"--kills={arguments.kills}"]
        # A process of its own for each number: memory is that of this number alone.
        done = subprocess.run([sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
    print_growth(rows, FIGURES)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


async def _measure(num_workers: int, train_s: float, kills: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shoal-scale-") as folder:
        world = ScaleWorld(num_workers)
        control_plane = ControlPlane(Path(folder), world.spec, num_workers)
        control_plane.follow(world.outbox.pull)
        try:
            return await _figures(world, control_plane, train_s, kills)
        finally:
            await world.close()
            control_plane.close()


async def _figures(world: ScaleWorld, control_plane: ControlPlane, train_s: float, kills: int) -> dict[str, Any]:
    num_workers = world.num_workers
    found: dict[str, Any] = {"workers": num_workers}
    began, cpu = time.perf_counter(), time.process_time()
    await world.start()
    found["start_s"], found["start_cpu_s"] = time.perf_counter() - began, time.process_time() - cpu
    await world.train(2.0)
    world.turns.clear()
    began, cpu = time.perf_counter(), time.process_time()
    await world.train(train_s)
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    found["train_cpu_share"] = cpu_s / elapsed_s
    found["events_per_s"] = world.turns.num_events / elapsed_s
    found["cpu_per_event_ms"] = 1e3 * cpu_s / max(1, world.turns.num_events)
    found["turn_p50_ms"], found["turn_p99_ms"] = (1e3 * _quantile(world.turns.seconds, q) for q in (0.5, 0.99))
    kill_s, turns = [], []
    writes, num_bytes, num_events = world.store.num_writes, world.store.num_bytes, 0
    for number in range(kills):
        world.turns.clear()
        kill_s.append(await world.lose_worker(rank=number + 1))
        turns += world.turns.seconds
        num_events += world.turns.num_events
        await world.train(1.0)
    found["kill_s"] = statistics.median(kill_s)
    found["kill_turn_p99_ms"] = 1e3 * _quantile(turns, 0.99)
    found["journal_writes"] = (world.store.num_writes - writes) / kills
    found["journal_kill_bytes"] = (world.store.num_bytes - num_bytes) / kills
    found["journal_event_bytes"] = (world.store.num_bytes - num_bytes) / num_events
    found["nodes_s"] = await world.lose_nodes(0.01)
    found["journal_bytes"] = max(len(value) for value in world.store.values.values())
    found["memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found["store_p50_ms"] = 1e3 * _quantile(control_plane.seconds, 0.5)
    found["store_cpu_s"] = control_plane.cpu_s
    return found


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0


if __name__ == "__main__":
    main()
