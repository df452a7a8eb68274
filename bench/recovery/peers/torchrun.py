"""torchrun with restarts: after a failure the agent kills the rest of the group and starts all 4 processes again.

Called by recovery/main.py.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from measurements.trial import Emit, Event, System, strike_all
from recovery.cells import Cells
from recovery.peers.run import start_peer, strike_in_turn
from recovery.workload import WORKERS

EVENTS = (Event.CONTROL, Event.WORKER_KILL, Event.WORKER_STOP)


def run_events(events: set[Event], folder: Path, cells: Cells, emit: Emit) -> None:
    """One run per call of `strike_all`: start, cause the events, end."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"),
        *(f"--nproc-per-node={WORKERS}", "--max-restarts=1000", "--monitor-interval=0.1"),
        *(str(Path(__file__).parent / "torchrun_worker.py"),),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # In torch 2.13 restarted processes use the store of the dead ones, where gloo finds the old addresses. A
        # restart then fails to connect or waits for half an hour. With one store per restart it works.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    chance = random.Random(cells.seed)

    def strike(remaining: list[Event]) -> None:
        place = folder / remaining[0]
        run = start_peer(System.TORCHRUN, place, cells.params, [*command, str(place)], environment)
        try:
            strike_in_turn(run, remaining, cells, chance, emit)
        finally:
            run.end()

    strike_all(System.TORCHRUN, [event for event in EVENTS if event in events], emit, strike)
