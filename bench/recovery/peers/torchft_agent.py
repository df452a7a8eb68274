"""The agent of the torchft peer: its lighthouse, and one process per replica, started again as soon as it ends.

    python bench/recovery/peers/torchft_agent.py FOLDER

torchft leaves restarts to a scheduler. This is the fastest possible one: it starts a dead replica in the same moment.
recovery/peers/torchft_replicas.py starts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torchft.coordination import LighthouseServer

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[3] / name) for name in ("bench", "tools"))

from recovery.workload import WORKERS

_WORKER = Path(__file__).parent / "torchft_worker.py"
_JOIN_MS, _TICK_MS, _HEARTBEAT_MS = 1000, 20, 1000
"""A replica counts as lost after a second without a heartbeat (default 5 s); a quorum forms without stragglers after
1 s (default 60 s)."""


def main() -> None:
    folder = sys.argv[1]
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=3,
        join_timeout_ms=_JOIN_MS,
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=_HEARTBEAT_MS,
    )
    port = lighthouse.address().rpartition(":")[2].rstrip("/")

    def start(rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(_WORKER), folder, str(rank), f"http://127.0.0.1:{port}"])

    replicas = {start(rank).pid: rank for rank in range(WORKERS)}
    while True:
        pid, _ = os.wait()
        rank = replicas.pop(pid)
        replicas[start(rank).pid] = rank


if __name__ == "__main__":
    main()
