"""The nodes of an embedded Ray cluster, to be killed and added: raylets on 127.0.0.1, 127.0.0.2, ...

Works from the note that `EmbeddedCluster` writes, for the cluster of a `shoal serve` as for one of the benchmark's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from recovery.processes import end_session, session_members

_STARTED = "Ray runtime started"
_START_TIMEOUT_S = 60.0


class Nodes:
    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        note: dict[str, Any] = json.loads((state_dir / "embedded-cluster.json").read_text())
        self.address: str = note["address"]
        self.temp_dir: str = note["temp_dir"]
        self.leaders: dict[str, int] = {f"127.0.0.{i + 1}": pid for i, pid in enumerate(note["pids"])}
        self._joined: list[int] = []

    @property
    def environment(self) -> dict[str, str]:
        """What a driver or a node of the cluster needs."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._state_dir / "ray-token"),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_worker_niceness": "0",
        }

    @property
    def sessions(self) -> list[int]:
        return [*self.leaders.values(), *self._joined]

    def ip_of(self, pid: int) -> str | None:
        """Of the node that a process belongs to."""
        session = os.getsid(pid)
        return next((ip for ip, leader in self.leaders.items() if leader == session), None)

    def raylet(self, ip: str) -> int:
        """Pid of a node's raylet."""
        [pid] = [pid for pid, command in session_members(self.leaders[ip]).items() if "/raylet " in f"{command} "]
        return pid

    def gcs(self) -> int:
        """Pid of the head's control service."""
        [pid] = [pid for pid, command in session_members(self.leaders["127.0.0.1"]).items() if "gcs_server" in command]
        return pid

    def add(self, ip: str, *, num_cpus: int) -> float:
        """Start another node; the time at which Ray says that it has started."""
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={self.address}"),
            *(f"--node-ip-address={ip}", f"--num-cpus={num_cpus}", "--object-store-memory=104857600"),
            *("--dashboard-agent-listen-port=0", "--include-log-monitor=false", "--disable-usage-stats"),
        ]
        log_path = self._state_dir / f"joined-{ip}-{len(self._joined)}.log"
        environment = {**os.environ, **self.environment, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
            )
        self._joined.append(process.pid)
        self.leaders[ip] = process.pid
        deadline = time.monotonic() + _START_TIMEOUT_S
        while _STARTED not in log_path.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"node {ip} did not start:\n{log_path.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        return time.time()

    def remove(self, ip: str) -> None:
        """End everything of a node."""
        end_session(self.leaders[ip])

    def end_joined(self) -> None:
        for leader in self._joined:
            end_session(leader)
