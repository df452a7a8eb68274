"""What a snapshot of a state on a GPU costs: seconds of the training thread, and of the compute stream.

    python bench/gpu_snapshots.py [--params 1.3e9] [--rounds 3]

The state is that of a model with AdamW in fp32: three tensors of 16 M elements for each 16 M parameters. A step is a
loop of matrix products of about half a second; between two of them a snapshot is taken, or none. What it holds up the
compute stream is the difference of their times. The last line is JSON. Without a GPU it uses a small state on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shoal_workers.snapshot_store.store import SnapshotStore

_ELEMENTS = 16 << 20
_STEP_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1.3e9)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    num = max(1, round(arguments.params / _ELEMENTS)) if has_gpu else 1
    room = os.statvfs("/dev/shm")
    most = int(room.f_bavail * room.f_frsize * 0.4 / (12 * _ELEMENTS))
    num = min(num, max(1, most))  # two slots
    state = {
        f"{kind}.{number}": torch.zeros(_ELEMENTS, device=device)
        for number in range(num)
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm") as root:
        store = SnapshotStore(job_id="bench", attempt=1, worker_id="a", node_id="a", key="bench", root=Path(root))
        try:
            print(json.dumps(_measure(store, state, device, arguments.rounds)))
        finally:
            store.close()


def _measure(
    store: SnapshotStore, state: dict[str, torch.Tensor], device: torch.device, rounds: int
) -> dict[str, object]:
    step = _Step(device)
    start = time.perf_counter()
    store.prepare(state, rank=0, world_size=1)
    prepared_s = time.perf_counter() - start
    plain_s, with_snapshot_s, thread_s = [], [], []
    for number in range(rounds + 1):
        step.run()
        plain = step.seconds(lambda: None)
        snapshot_s = [0.0]

        def snapshot(number: int = number, snapshot_s: list[float] = snapshot_s) -> None:
            begun = time.perf_counter()
            store.snapshot(state, generation=1, rank=0, world_size=1, step=number, extra={})
            snapshot_s[0] = time.perf_counter() - begun

        held = step.seconds(snapshot)
        if number:  # the first one lays out the slots
            plain_s.append(plain)
            with_snapshot_s.append(held)
            thread_s.append(snapshot_s[0])
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    held_s = statistics.median(with_snapshot_s) - statistics.median(plain_s)
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "gb": round(num_bytes / 1e9, 2),
        "prepare_s": round(prepared_s, 2),
        "thread_ms": round(1000 * statistics.median(thread_s), 1),
        "compute_stream_ms": round(1000 * held_s, 1),
        "step_ms": round(1000 * statistics.median(plain_s), 1),
        "gb_per_s": round(num_bytes / 1e9 / max(held_s, 1e-9), 1),
    }


class _Step:
    """Matrix products for about half a second."""

    def __init__(self, device: torch.device) -> None:
        size = 8192 if device.type == "cuda" else 256
        self._device = device
        self._a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self._num = 4
        self.run()
        once = self.seconds(lambda: None) / 2
        self._num = max(4, round(self._num * _STEP_S / 2 / once))

    def run(self) -> None:
        for _ in range(self._num):
            torch.mm(self._a, self._a)

    def seconds(self, between: Callable[[], None]) -> float:
        """Seconds until the GPU has ended two steps with something between them."""
        self._wait()
        start = time.perf_counter()
        self.run()
        between()
        self.run()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
