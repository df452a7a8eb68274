"""How long shards take to start: forked from the node's server, against an interpreter for each.

    python bench/start.py [--shards 4] [--rounds 3]

A local Ray cluster; each round starts so many actors at once, each of which has the engine imported when it answers.
The two ways take turns. One line of JSON at the end: medians in seconds, processor seconds and private memory a shard.
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
        """Processor seconds since it began, MiB that are its own."""
        import shoal_workers.engine.engine  # noqa: F401

        fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        own_kib = sum(int(value) for name, value, *_ in fields if name in ("Private_Clean:", "Private_Dirty:"))
        return time.process_time(), own_kib / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ray.init(num_cpus=arguments.shards, include_dashboard=False, log_to_driver=False)
    probe = ray.remote(num_cpus=1)(Probe)
    ways: dict[str, dict[str, Any]] = {
        "interpreters": {"env_vars": {"OMP_NUM_THREADS": "1"}},
        "forked": {"env_vars": {"OMP_NUM_THREADS": "1"}, "py_executable": py_executable(fork=True)},
    }
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    first_s = _start(probe, ways["forked"], arguments.shards)[0]  # the server imports meanwhile
    print(f"the first {arguments.shards} of a node, with their server: {first_s:.2f} s", flush=True)
    for _ in range(arguments.rounds):
        for way, runtime_env in ways.items():
            found[way].append(_start(probe, runtime_env, arguments.shards))
            print(f"{way:12} {found[way][-1][0]:6.2f} s, {found[way][-1][2]:4.0f} MiB of its own each", flush=True)
    medians = {
        way: dict(zip(("start_s", "cpu_s", "own_mib"), map(statistics.median, zip(*rounds, strict=True)), strict=True))
        for way, rounds in found.items()
    }
    print(json.dumps({"machine": describe(), "load": os.getloadavg()[0], "first_s": first_s, **medians}))


def _start(probe: Any, runtime_env: dict[str, Any], count: int) -> tuple[float, float, float]:
    """Seconds until all are ready; of one, processor seconds since its process began and MiB of its own."""
    start = time.perf_counter()
    shards = [probe.options(runtime_env=runtime_env).remote() for _ in range(count)]
    answers = ray.get([shard.ready.remote() for shard in shards])
    took = time.perf_counter() - start
    for shard in shards:
        ray.kill(shard)
    return took, *map(statistics.median, zip(*answers, strict=True))


if __name__ == "__main__":
    main()
