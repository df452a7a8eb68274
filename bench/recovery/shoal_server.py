"""A `shoal serve` that can be killed and started again, with its embedded cluster of one or several nodes.

Unlike bench/real_server.py it may die in the middle of a benchmark; `end` leaves nothing of it, however it died.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recovery.nodes import Nodes
from recovery.processes import end_session
from recovery.trial import EventFailed
from shoal_api.client import ApiError, Client, Disconnected

_LISTENING = "listening on "
_PATIENCE_S = 90.0


class ShoalServer:
    """`options` are those of `shoal serve` after the port and the state directory."""

    def __init__(self, state_dir: Path, options: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._state_dir = state_dir
        self._options = options
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._starts = 0
        self.nodes = Nodes(state_dir)
        """Of its embedded cluster."""
        self.started_at = 0.0
        """When the newest process was started, wall-clock time."""
        self.listening_at = 0.0

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self._port}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Until the cluster is connected and the lease is held."""
        self._state_dir.mkdir(parents=True, exist_ok=True)
        log_path = self._state_dir / f"serve-{self._starts}.log"
        self._starts += 1
        command = [sys.executable, "-m", "shoal_api.cli.main", "serve", f"--port={self._port}"]
        self.started_at = time.time()
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--state-dir={self._state_dir}", *self._options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self._environment},
            )  # fmt: skip
        self._port = int(self._wait_for_line(log_path).rpartition(":")[2])
        self.listening_at = time.time()
        with self.client as client:
            deadline = time.monotonic() + _PATIENCE_S
            while not _is_ready(client):
                if time.monotonic() > deadline:
                    raise EventFailed(f"shoal serve is not ready:\n{log_path.read_text()[-3000:]}")
                time.sleep(0.05)

    def wait_for_cpus(self, num_cpus: float) -> None:
        """Until every node of the cluster has joined."""
        deadline = time.monotonic() + _PATIENCE_S
        with self.client as client:
            while (cluster := client.cluster()).cpus_total < num_cpus:
                if time.monotonic() > deadline:
                    shown = ", ".join(f"{node.ip} ({node.cpus:g} CPU, alive: {node.alive})" for node in cluster.nodes)
                    raise EventFailed(f"the cluster has {cluster.cpus_total:g} of {num_cpus:g} CPUs: {shown}")
                time.sleep(0.1)

    def kill(self) -> float:
        """SIGKILL; the time of it. The cluster lives on."""
        assert self._process is not None
        at = time.time()
        self._process.kill()
        self._process.wait()
        return at

    def end(self) -> None:
        """In order if it answers, by force if not; then whatever is left of the cluster."""
        if self._process is None:
            return
        known = (self._state_dir / "embedded-cluster.json").exists()
        sessions = [session for ip in self.nodes.ips() for session in self.nodes.sessions(ip)] if known else []
        scratch = self.nodes.temp_dir if known else None
        try:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            for session in [*sessions, self._process.pid]:
                end_session(session)
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)

    def _wait_for_line(self, log_path: Path) -> str:
        assert self._process is not None
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            for line in log_path.read_text(errors="replace").splitlines():
                if line.startswith(_LISTENING):
                    return line
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EventFailed(f"shoal serve does not listen:\n{log_path.read_text(errors='replace')[-3000:]}")
            time.sleep(0.02)


def _is_ready(client: Client) -> bool:
    try:
        return bool(client.ready().owner)
    except (ApiError, Disconnected):
        return False
