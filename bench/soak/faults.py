"""The faults of the matrix as operations on a running cluster. main.py decides which fault happens when.

Each operation undoes its fault (a killed server runs again, a removed node is back) and then returns the text for the
timeline. Whether training continues is checked afterwards.
"""

from __future__ import annotations

import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from kit.processes.os_processes import send
from kit.processes.ray_nodes import HEAD
from shoal_server import ShoalServer
from shoal_service.views import WorkerView

_MATRIX = Path(__file__).parents[2] / "tests" / "chaos" / "fault_matrix.yaml"


def fault_names() -> list[str]:
    return list(yaml.safe_load(_MATRIX.read_text())["faults"])


class Strikes:
    """`state_dir`: the control plane's directory, with its database and checkpoints."""

    def __init__(
        self, server: ShoalServer, state_dir: Path, job_ids: list[str], chance: random.Random, num_cpus: int
    ) -> None:
        """`num_cpus`: CPUs of each node."""
        self._num_cpus = num_cpus
        self._nodes = server.nodes
        self._server = server
        self._state_dir = state_dir
        self._job_ids = job_ids
        self._chance = chance
        self._does: dict[str, Callable[[], str]] = {
            "worker": self._worker,
            "two_workers": self._two_workers,
            "buddy": self._buddy,
            "node": self._node,
            "head": self._head,
            "supervisor": self._supervisor,
            "control_plane": self._control_plane,
            "standby": self._standby,
            "storage": self._storage,
            "database": self._database,
        }

    def do(self, fault: str) -> str:
        return self._does[fault]()

    def _worker(self) -> str:
        found = self._ranked()
        if not found:
            return "no worker trains at the moment"
        return self._kill(self._chance.choice(found))

    def _two_workers(self) -> str:
        found = self._ranked()
        if len(found) < 2:
            return "fewer than two workers train at the moment"
        return " and ".join(self._kill(worker) for worker in self._chance.sample(found, 2))

    def _buddy(self) -> str:
        """A worker that is on another node than a surviving worker of the group."""
        found = self._ranked()
        others = [one for one in found if any(one.node_ip != other.node_ip for other in found)]
        return self._kill(self._chance.choice(others)) if others else "all workers are on one node"

    def _node(self) -> str:
        ip = self._chance.choice([ip for ip in self._nodes.ips() if ip != HEAD])
        self._nodes.kill_raylet(ip)
        time.sleep(self._chance.uniform(2, 4))
        self._nodes.remove(ip)
        gone_s = self._chance.uniform(0, 5)
        time.sleep(gone_s)
        self._nodes.add(ip, num_cpus=self._num_cpus)
        return f"raylet of {ip}; a new node replaced it"

    def _head(self) -> str:
        killed_at = self._nodes.kill_head()
        while not self._nodes.is_head_alive():
            time.sleep(0.1)
        return f"all processes of the head; it ran again after {time.time() - killed_at:.1f} s"

    def _supervisor(self) -> str:
        pids = self._nodes.pids_of("SupervisorActor")
        if not pids:
            return "there is none at the moment"
        pid = self._chance.choice(pids)
        send(pid, signal.SIGKILL)
        return f"pid {pid}"

    def _control_plane(self) -> str:
        self._server.kill()
        gone_s = self._chance.uniform(0, 3)
        time.sleep(gone_s)
        self._server.start()
        return f"started again after {gone_s:.1f} s"

    def _standby(self) -> str:
        spares = [one for one in self._workers() if one.rank is None and one.pid]
        return self._kill(self._chance.choice(spares)) if spares else "there is none at the moment"

    def _storage(self) -> str:
        checkpoints = self._state_dir / "checkpoints"
        aside = self._state_dir / "checkpoints-aside"
        gone_s = self._chance.uniform(2, 6)
        checkpoints.rename(aside)
        checkpoints.touch()
        try:
            time.sleep(gone_s)
        finally:
            checkpoints.unlink()
            aside.rename(checkpoints)
        return f"could not be written to for {gone_s:.1f} s"

    def _database(self) -> str:
        locked_s = self._chance.uniform(1, 5)
        connection = sqlite3.connect(self._state_dir / "shoal.db", timeout=30.0, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(locked_s)
            connection.execute("ROLLBACK")
        finally:
            connection.close()
        return f"write-locked for {locked_s:.1f} s"

    def _kill(self, worker: WorkerView) -> str:
        send(worker.pid, signal.SIGKILL)
        return f"rank {worker.rank} of {worker.worker_id} (pid {worker.pid}, {worker.node_ip})"

    def _ranked(self) -> list[WorkerView]:
        return [one for one in self._workers() if one.rank is not None and one.pid]

    def _workers(self) -> list[WorkerView]:
        with self._server.client as client:
            return [one for job_id in self._job_ids for one in client.workers(job_id)]
