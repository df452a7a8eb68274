"""Seconds until workers are ready: forked from the node's fork server, and each in a new interpreter.

    python bench/start.py [--workers 4] [--rounds 3]

Each round starts that many actors at once on a local Ray cluster; an actor answers when it has imported the engine. The
two ways take turns. The last line is JSON: medians of seconds, of processor seconds and of private memory per worker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.append(str(Path(__file__).parents[1] / "tools"))

import ray
from measurements.machine import describe
from shoal_workers.forkserver import py_executable


class Probe:
    def ready(self) -> tuple[float, float]:
        """Processor seconds since the process began, and its private memory in MiB."""
        import shoal_workers.engine.engine  # noqa: F401

        fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        own_kib = sum(int(value) for name, value, *_ in fields if name in ("Private_Clean:", "Private_Dirty:"))
        return time.process_time(), own_kib / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ray.init(num_cpus=arguments.workers, include_dashboard=False, log_to_driver=False)
    probe = ray.remote(num_cpus=1)(Probe)
    ways: dict[str, dict[str, Any]] = {
        "interpreters": {"env_vars": {"OMP_NUM_THREADS": "1"}},
        "forked": {"env_vars": {"OMP_NUM_THREADS": "1"}, "py_executable": py_executable(fork=True)},
    }
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    first_s = _start(probe, ways["forked"], arguments.workers)[0]  # includes the start of the fork server
    print(
        f"the first {arguments.workers} workers of a node, with the start of its fork server: {first_s:.2f} s",
        flush=True,
    )
    for _ in range(arguments.rounds):
        for way, runtime_env in ways.items():
            found[way].append(_start(probe, runtime_env, arguments.workers))
            print(f"{way:12} {found[way][-1][0]:6.2f} s, {found[way][-1][2]:4.0f} MiB private memory each", flush=True)
    medians = {
        way: dict(zip(("start_s", "cpu_s", "own_mib"), map(statistics.median, zip(*rounds, strict=True)), strict=True))
        for way, rounds in found.items()
    }
    print(json.dumps({"machine": describe(), "load": os.getloadavg()[0], "first_s": first_s, **medians}))


def _start(probe: Any, runtime_env: dict[str, Any], count: int) -> tuple[float, float, float]:
    """Starts processes. Returns the seconds until all are ready, and medians of their processor seconds and private
    MiB."""
    start = time.perf_counter()
    actors = [probe.options(runtime_env=runtime_env).remote() for _ in range(count)]
    answers = ray.get([actor.ready.remote() for actor in actors])
    took = time.perf_counter() - start
    for actor in actors:
        ray.kill(actor)
    return took, *map(statistics.median, zip(*answers, strict=True))


if __name__ == "__main__":
    main()
