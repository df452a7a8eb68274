"""Streamed shards on one machine: seconds until the first batch, waits for data, memory, quality of the shuffle.

    python bench/shard_streaming/main.py [--rounds 3] [--steps 300] [--latency-ms 50] [--parts first,waits,shuffle]

The shards come from tests/kit/processes/generated_shards.py, in a process of its own, which delays each answer and
fails 2 % of them in each of three ways: 429, 503, a connection that breaks. Each measurement is a process of its own
with an empty cache. A step reads 64 samples of 4 KiB and then sleeps 200 ms, as if an accelerator computed. Prints
Markdown, and what a round found as JSON on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from kit.processes.generated_shards import GeneratedShards, generated_shards
from measurements.machine import describe
from shard_streaming.shuffling import BATCH_SIZE, NUM_SHARDS, SAMPLES_PER_SHARD, qualities

_RECORD_BYTES, _SAMPLES, _BLOCK_SHARDS = 4096, 512, 8
_SHARD_BYTES = _RECORD_BYTES * _SAMPLES
_STEP_S = 0.2
_FAULT = 0.02
_SIZES = {"500 MB": 240, "500 TB": 240_000_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--parts", default="first,waits,shuffle")
    arguments = parser.parse_args()
    print(f"{describe()}, load {os.getloadavg()[0]:.1f}\n")
    with generated_shards(latency_ms=arguments.latency_ms, throttled=_FAULT, failing=_FAULT, cut=_FAULT) as server:
        if "first" in arguments.parts:
            _print_first(server, arguments.rounds)
        if "waits" in arguments.parts:
            _print_waits(server, arguments.steps)
        print(f"\nThe server: {server.statistics()}, load {os.getloadavg()[0]:.1f}\n")
    if "shuffle" in arguments.parts:
        _print_shuffling()


def _print_first(server: GeneratedShards, rounds: int) -> None:
    print("| data set | format | first batch, s | its CPU time, s | second to fifth, s |\n|---|---|---|---|---|")
    for size, num_shards in _SIZES.items():
        for format in ("raw", "mds"):
            found = [_measured(server, num_shards, format, position=0, steps=5) for _ in range(rounds)]
            first = [one["first_s"] for one in found]
            cpu = [one["first_cpu_s"] for one in found]
            others = [wait for one in found for wait in one["waits_s"][1:]]
            print(f"| {size} | {format} | {_range(first)} | {_range(cpu)} | {_range(others)} |", flush=True)


def _print_waits(server: GeneratedShards, steps: int) -> None:
    titles = (
        "format, position | steps | blocks | until the block is here | wait of a later step, ms | share of the step"
    )
    print(f"\n| {titles} |")
    print("|---|---|---|---|---|---|")
    for format, position in (("raw", 0), ("mds", 10**9)):
        found = _measured(server, _SIZES["500 TB"], format, position=position, steps=steps)
        waits = found["waits_s"]
        warm = next((at for at in range(len(waits)) if max(waits[at : at + 10]) < 0.02), len(waits))
        later = waits[warm:]
        print(
            f"| {format}, {position:,} | {steps} | {found['blocks']:.1f} | {sum(waits[:warm]):.2f} s in {warm} steps "
            f"| mean {1e3 * statistics.mean(later):.2f}, largest {1e3 * max(later):.1f} "
            f"| {statistics.mean(later) / (_STEP_S + statistics.mean(later)):.2%} |"
        )
        print(
            f"\nMemory that {format} added to the process: {found['grown_mib']:.0f} MiB; the cache had "
            f"{found['cache_bytes'] >> 20} of {_cache_bytes() >> 20} MiB.",
            file=sys.stderr,
            flush=True,
        )


def _cache_bytes() -> int:
    return 4 * _BLOCK_SHARDS * _SHARD_BYTES


def _measured(server: GeneratedShards, num_shards: int, format: str, *, position: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "shards": server.pattern(num_shards, samples=_SAMPLES, num_bytes=_RECORD_BYTES, format=format),
            "format": format,
            "record_bytes": _RECORD_BYTES,
            "position": position,
            "steps": steps,
            "step_s": _STEP_S,
            "batch_size": 64,
            "block_samples": _BLOCK_SHARDS * _SAMPLES,
            "arguments": {"cache_dir": directory, "cache_bytes": _cache_bytes(), "block_shards": _BLOCK_SHARDS},
        }
        answer = subprocess.run(
            [sys.executable, Path(__file__).parent / "reader.py", json.dumps(settings)],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    found: dict[str, Any] = json.loads(answer.stdout)
    print(json.dumps({**found, "waits_s": [round(wait, 5) for wait in found["waits_s"]]}), file=sys.stderr)
    return found


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _print_shuffling() -> None:
    print(
        f"{NUM_SHARDS:,} shards of {SAMPLES_PER_SHARD:,} samples, batches of {BATCH_SIZE}, one label in each shard:\n"
    )
    print("| shuffled | labels in a batch | same label again | spread of batches | distance |\n|---|---|---|---|---|")
    for one in qualities((1, 4, 16, 64, 256)):
        print(
            f"| {one.order} | {one.labels_in_a_batch:.1f} | {one.same_label_again:.2%} | {one.spread_of_batches:.2f} "
            f"| {one.distance:.3f} |"
        )


if __name__ == "__main__":
    main()
