"""How long `log` keeps the training thread, for values of several sizes, while the recorder writes to a directory.

    .venv/bin/python bench/media.py [CALLS]

Prints a table in milliseconds. "CPU" is the time of the training thread's own work, which does not depend on what else
the machine does; "elapsed" also has the moments in which another process or thread had its core, and says nothing on a
busy machine. Before each call all that was logged is written anew, as a training step would, so the caches of the CPU
hold other values. Each call waits until the recorder has written the one before, so that none is dropped; in the rows
"while one is written" it does not, and the recorder encodes images at the same time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal_workers.contract.media import MediaSpec
from shoal_workers.engine.media.recorder import Recorder

_CACHE_BYTES = 64 << 20
"""Written before each call: more than the caches hold."""
_WARM_UP = 3

Values = dict[str, dict[str, Any]]


def main() -> None:
    num_calls = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    torch.set_num_threads(1)
    print(f"| logged, {num_calls} calls each | CPU median | CPU p99 | elapsed median | elapsed p99 |")
    print("|---|---|---|---|---|")
    for name, make in _cases().items():
        values = make()
        _print(name, *_measured(values, num_calls, overlaps=False))
        if name in _OVERLAPPED:
            _print(f"{name}, while one is written", *_measured(values, num_calls, overlaps=True))
        del values


def _cases() -> dict[str, Callable[[], Values]]:
    draw = np.random.default_rng(0)
    return {
        "64 images 3 x 1024 x 1024, float32": lambda: {"images": {"x": torch.rand(64, 3, 1024, 1024)}},
        "16 arrays 1024 x 1024 x 3, bytes": lambda: {
            "images": {"x": [np.zeros((1024, 1024, 3), np.uint8) for _ in range(16)]}
        },
        "8 images 3 x 224 x 224, float32": lambda: {"images": {"x": torch.rand(8, 3, 224, 224)}},
        "image 1080 x 1920 x 3, float64": lambda: {"images": {"x": draw.random((1080, 1920, 3))}},
        "image 512 x 512 x 3, bytes": lambda: {"images": {"x": np.zeros((512, 512, 3), np.uint8)}},
        "histogram of 100,000,000 values": lambda: {"histogram": {"w": torch.rand(100_000_000)}},
        "histogram of 100,000,000 values, transposed": lambda: {"histogram": {"w": torch.rand(20_000, 5_000).T}},
        "histogram of every second column": lambda: {"histogram": {"w": torch.rand(5_000, 4_000)[:, ::2]}},
        "16 histograms of 1,000,000 values": lambda: {
            "histogram": {f"w{number}": torch.rand(1_000_000) for number in range(16)}
        },
        "histogram of a list of 1,000,000 numbers": lambda: {"histogram": {"w": [n / 2 for n in range(1_000_000)]}},
        "table of 100,000 rows x 3": lambda: {
            "table": {"t": [{"a": n, "b": str(n), "c": n / 2} for n in range(100_000)]}
        },
        "text of 1,000,000 characters": lambda: {"text": {"t": "x" * 1_000_000}},
    }


_OVERLAPPED = ("8 images 3 x 224 x 224, float32", "histogram of 100,000,000 values")


def _measured(values: Values, num_calls: int, *, overlaps: bool) -> tuple[list[float], list[float]]:
    """CPU and elapsed time of each call, milliseconds, sorted."""
    others = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)
    cpu, elapsed = [], []
    with tempfile.TemporaryDirectory() as root:
        recorder = Recorder(root, MediaSpec(max_steps=8), say=print)
        for step in range(num_calls + _WARM_UP):
            recorder.begin(attempt=1, generation=1, rank=0, is_fenced=lambda: False)
            others.fill_(step % 256)
            if overlaps:
                recorder.log(step, images={"x": torch.rand(3, 400, 400)})
            start, start_cpu = time.perf_counter(), time.thread_time()
            recorder.log(step, **values)
            if step >= _WARM_UP:
                cpu.append((time.thread_time() - start_cpu) * 1000)
                elapsed.append((time.perf_counter() - start) * 1000)
            recorder.end(within_s=60)
        recorder.close()
    return sorted(cpu), sorted(elapsed)


def _print(name: str, cpu: list[float], elapsed: list[float]) -> None:
    cells = [f"{times[int(len(times) * part)]:.2f}" for times in (cpu, elapsed) for part in (0.5, 0.99)]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
