"""A `shoal serve` for the benchmarks, with its embedded cluster: killed, started again, and ended without leftovers.

`serving` is for benchmarks that strike at nothing. The process itself is that of tests/kit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kit.processes.os_processes import end_session
from kit.processes.ray_nodes import Nodes
from kit.processes.server import Server, until
from measurements.trial import EventFailed
from shoal_api.client import ApiError, Client, Disconnected

_PATIENCE_S = 90.0


class ShoalServer(Server):
    """`options` are those of `shoal serve` after the port and the state directory."""

    def __init__(self, state_dir: Path, options: Sequence[str], environment: dict[str, str] | None = None) -> None:
        sources = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        thrown_away = {"SHOAL_STOP_S": "0"}
        environment = {**thrown_away, **sources, **(environment or {})}
        super().__init__(Path(sys.executable), state_dir, list(options), environment)
        self.nodes = Nodes(state_dir)
        """The nodes of its embedded cluster."""
        self.started_at = 0.0
        """When the newest process was started, wall-clock time."""
        self.listening_at = 0.0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> ShoalServer:
        """Starts the server. Returns when the cluster is connected and the lease is held."""
        self.listen()
        with self.client as client:
            until(lambda: _is_ready(client), "the server is ready", _PATIENCE_S)
        return self

    def listen(self) -> None:
        """Starts the server. Returns when it answers; supervisors may report from then on."""
        self.started_at = time.time()
        super().start()
        self.listening_at = time.time()

    def wait_for_cpus(self, num_cpus: float) -> None:
        """Waits until every node of the cluster has joined."""
        deadline = time.monotonic() + _PATIENCE_S
        with self.client as client:
            while (cluster := client.cluster()).cpus_total < num_cpus:
                if time.monotonic() > deadline:
                    shown = ", ".join(f"{node.ip} ({node.cpus:g} CPU, alive: {node.alive})" for node in cluster.nodes)
                    raise EventFailed(f"the cluster has {cluster.cpus_total:g} of {num_cpus:g} CPUs: {shown}")
                time.sleep(0.1)

    def end(self) -> None:
        """Stops the server in order if it answers, by force if it does not; then ends what is left of the cluster."""
        if self.process is None:
            return
        known = self.note is not None
        sessions = [session for ip in self.nodes.ips() for session in self.nodes.sessions(ip)] if known else []
        scratch = self.nodes.temp_dir if known else None
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        finally:
            for session in [*sessions, self.process.pid]:
                end_session(session)
            self.sweep()
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def serving(state_dir: Path, *, num_cpus: int) -> Iterator[ShoalServer]:
    """A server that is ready for jobs, on an embedded cluster of one node."""
    server = ShoalServer(state_dir, [f"--num-cpus={num_cpus}"])
    try:
        yield server.start()
    finally:
        server.end()


def _is_ready(client: Client) -> bool:
    try:
        return bool(client.ready().owner)
    except (ApiError, Disconnected):
        return False
