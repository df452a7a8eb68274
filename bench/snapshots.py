"""The snapshot store against memcpy: snapshot, copy to the buddy, restore from local memory, restore over TCP.

    python bench/snapshots.py [--mib 30] [--rounds 30]

Two processes play two nodes on one machine. The state resembles that of a small transformer with AdamW. Each figure is
given as best and as median of the rounds in GiB/s: other load can only make a round slower. The cold snapshot was not
prepared, so its time includes the allocation of memory. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.snapshot_store.transfer.sender import SendCost

_WIDTHS = (512, 512 * 4, 64, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=30, help="size of the state (default 30)")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm") as root:
        ours, theirs = multiprocessing.Pipe()
        buddy = multiprocessing.get_context("fork").Process(target=_buddy, args=(theirs, root))
        buddy.start()
        try:
            print(json.dumps(_measure(Path(root), ours, arguments.mib << 20, arguments.rounds)))
        finally:
            ours.send(None)
            buddy.join()


def _buddy(connection: Connection, root: str) -> None:
    """Runs as the process of the other node, which serves until a message arrives on the connection."""
    torch.set_num_threads(1)
    store = SnapshotStore(job_id="bench", attempt=1, worker_id="b", node_id="b", key="bench", root=Path(root))
    connection.send(store.port)
    connection.recv()
    store.close()


def _measure(root: Path, connection: Connection, num_bytes: int, rounds: int) -> dict[str, object]:
    torch.set_num_threads(1)
    buddy = SnapshotServer(node_id="b", host="127.0.0.1", port=connection.recv())
    store = SnapshotStore(job_id="bench", attempt=1, worker_id="a", node_id="a", key="bench", root=root)
    far = SnapshotStore(job_id="bench", attempt=1, worker_id="c", node_id="c", key="bench", root=root)
    state = _state(num_bytes)
    size = sum(tensor.nbytes for tensor in state.values())
    whole, other = torch.rand(size // 4), torch.rand(size // 4)
    target = {name: torch.rand_like(tensor) for name, tensor in state.items()}
    cold_s = far.snapshot(state, generation=1, rank=0, world_size=1, step=0, extra={})
    store.prepare(state, rank=0, world_size=1)
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", "snapshot", "send", "local", "remote")}
    send_cpu_s: list[float] = []
    for step in range(1, rounds + 1):
        seconds["memcpy"].append(_time(lambda: whole.copy_(other)))
        seconds["snapshot"].append(
            store.snapshot(state, generation=1, rank=0, world_size=1, step=step, extra={"step": step})
        )
        assert store.replicate(buddy)
        cost = _wait(store)
        seconds["send"].append(cost.wall_s)
        send_cpu_s.append(cost.cpu_s)
        source = SnapshotSource(generation=1, world_size=1, step=step, parts=(buddy,))
        seconds["local"].append(_time(lambda: store.load(target, source, check=_nothing)))  # noqa: B023
        seconds["remote"].append(_time(lambda: far.load(target, source, check=_nothing)))  # noqa: B023
    assert all(torch.equal(target[name], state[name]) for name in state)
    store.close()
    far.close()
    return {
        "state_mib": round(size / (1 << 20), 1),
        "tensors": len(state),
        "best_gib_s": {name: _gib_s(size, min(times)) for name, times in seconds.items()},
        "median_gib_s": {name: _gib_s(size, statistics.median(times)) for name, times in seconds.items()},
        "cold_snapshot_ms": round(1000 * cold_s, 2),
        "snapshot_ms": round(1000 * statistics.median(seconds["snapshot"]), 2),
        "snapshot_of_memcpy": round(min(seconds["memcpy"]) / min(seconds["snapshot"]), 3),
        "send_cpu_ms": round(1000 * statistics.median(send_cpu_s), 2),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _state(num_bytes: int) -> dict[str, torch.Tensor]:
    """Parameters and two moments each, matrices and vectors, and AdamW's step counters."""
    state: dict[str, torch.Tensor] = {}
    left, number = num_bytes, 0
    while left > 0:
        shape = (_WIDTHS[number % len(_WIDTHS)], 512)
        name = f"layers.{number}.weight"
        for part in (f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"):
            state[part] = torch.rand(shape)
            left -= state[part].nbytes
        state[f"optim.{name}.step"] = torch.tensor(7.0)
        number += 1
    return state


def _wait(store: SnapshotStore) -> SendCost:
    while (cost := store.sender.take_cost()) is None:
        time.sleep(0.0005)
    return cost


def _time(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _gib_s(num_bytes: int, seconds: float) -> float:
    return round(num_bytes / seconds / (1 << 30), 2)


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
