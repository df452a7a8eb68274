"""How long `log` keeps the training thread, for values of several sizes, while the recorder writes to a directory.

    .venv/bin/python bench/media.py [CALLS]

Prints a table in milliseconds: median, 99th percentile and maximum of the calls. Each call waits until the recorder has
written the one before, so that none is dropped.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

from shoal_workers.contract.media import MediaSpec
from shoal_workers.engine.media.recorder import Recorder


def main() -> None:
    num_calls = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    torch.set_num_threads(1)
    values: dict[str, dict[str, Any]] = {
        "histogram of 20,000,000 values": {"histogram": {"w": torch.randn(20_000_000)}},
        "histogram of a transposed 2,000 x 10,000": {"histogram": {"w": torch.randn(10_000, 2_000).T}},
        "8 images 3 x 224 x 224, float32": {"images": {"x": torch.rand(8, 3, 224, 224)}},
        "image 1,080 x 1,920 x 3, float64": {"images": {"x": np.random.default_rng(0).random((1080, 1920, 3))}},
        "image 512 x 512 x 3, bytes": {"images": {"x": np.zeros((512, 512, 3), np.uint8)}},
        "table of 1,000 rows x 3": {"table": {"t": [{"a": n, "b": str(n), "c": n / 2} for n in range(1000)]}},
        "text of 100,000 characters": {"text": {"t": "x" * 100_000}},
    }
    print(f"| logged, {num_calls} calls each | median ms | p99 ms | max ms |\n|---|---|---|---|")
    for name, logged in values.items():
        with tempfile.TemporaryDirectory() as root:
            recorder = Recorder(root, MediaSpec(max_steps=8), say=print)
            spent = []
            for step in range(num_calls):
                recorder.begin(attempt=1, generation=1, rank=0, is_over=lambda: False)
                start = time.perf_counter()
                recorder.log(step, **logged)
                spent.append((time.perf_counter() - start) * 1000)
                recorder.end(within_s=60)
            recorder.close()
        spent.sort()
        print(
            f"| {name} | {spent[len(spent) // 2]:.3f} | {spent[int(len(spent) * 0.99)]:.3f} | {spent[-1]:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
