"""torchrun with restarts: the agent kills what is left of the group and starts all 4 processes anew."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from recovery.peers import kill_workers, start_peer, stop_worker
from recovery.trial import Emit, Event, System
from recovery.workload import WORKERS

EVENTS = (Event.SHARD_KILL, Event.SHARD_STOP)


def run_events(events: set[Event], folder: Path, *, kills: int, seed: int, emit: Emit) -> None:
    """Start it, strike, end it."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"),
        *(f"--nproc-per-node={WORKERS}", "--max-restarts=1000", "--monitor-interval=0.1"),
        *(str(Path(__file__).parent / "torchrun_worker.py"), str(folder)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # torch 2.13 lets restarted processes meet in the store of the dead ones, where gloo finds their old addresses:
        # a restart then fails to connect, or waits half an hour. With a store per restart it works.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    chance = random.Random(seed)
    run = start_peer(System.TORCHRUN, folder, command, environment)
    try:
        if Event.SHARD_KILL in events:
            kill_workers(run, kills, chance, emit)
        if Event.SHARD_STOP in events:
            stop_worker(run, chance, emit)
    finally:
        run.end()
