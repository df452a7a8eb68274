"""torchft: replicas that train data-parallel, of which a dead one is left out of the next quorum and joins again later.

Called by recovery/main.py. Needs the package torchft (extra `peers`); without it every event is recorded with the
reason. Each worker holds the whole model: torchft replaces whole replicas, never a part of a sharded one.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path

from measurements.trial import Emit, Event, System, Trial, strike_all
from recovery.cells import Cells
from recovery.peers.run import start_peer, strike_in_turn

EVENTS = (Event.CONTROL, Event.WORKER_KILL, Event.WORKER_STOP)
_AGENT = Path(__file__).parent / "torchft_agent.py"


def run_events(events: set[Event], folder: Path, cells: Cells, emit: Emit) -> None:
    """One run per call of `strike_all`: start, cause the events, end."""
    chosen = [event for event in EVENTS if event in events]
    if importlib.util.find_spec("torchft") is None:
        for event in chosen:
            emit(Trial(System.TORCHFT, event, failed="torchft is not installed: pip install 'shoal[peers]'"))
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    chance = random.Random(cells.seed)

    def strike(remaining: list[Event]) -> None:
        place = folder / remaining[0]
        run = start_peer(System.TORCHFT, place, cells.params, [sys.executable, str(_AGENT), str(place)], environment)
        try:
            strike_in_turn(run, remaining, cells, chance, emit)
        finally:
            run.end()

    strike_all(System.TORCHFT, chosen, emit, strike)
