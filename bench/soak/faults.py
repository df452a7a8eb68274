"""The faults of the matrix as things that are done to a living cluster, and undone. Which and when, others decide.

Each returns the words for the timeline, once the world is whole again: what was killed has been started, what was
taken away is back. Whether training goes on is looked at afterwards.
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

_MATRIX = Path(__file__).parent.parent.parent / "tests" / "chaos" / "fault_matrix.yaml"


def fault_names() -> list[str]:
    return list(yaml.safe_load(_MATRIX.read_text())["faults"])


class Strikes:
    """`state_dir` is the control plane's: its database and checkpoints."""

    def __init__(
        self, server: ShoalServer, state_dir: Path, job_ids: list[str], chance: random.Random, num_cpus: int
    ) -> None:
        """`num_cpus`: of each node."""
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
        found = self._members()
        if not found:
            return "nobody trains just now"
        return self._kill(self._chance.choice(found))

    def _two_workers(self) -> str:
        found = self._members()
        if len(found) < 2:
            return "fewer than two train just now"
        return " and ".join(self._kill(worker) for worker in self._chance.sample(found, 2))

    def _buddy(self) -> str:
        """Somebody on another node than a member that lives on."""
        found = self._members()
        others = [one for one in found if any(one.node_ip != other.node_ip for other in found)]
        return self._kill(self._chance.choice(others)) if others else "all are on one node"

    def _node(self) -> str:
        ip = self._chance.choice([ip for ip in self._nodes.ips() if ip != HEAD])
        self._nodes.kill_raylet(ip)
        time.sleep(self._chance.uniform(2, 4))
        self._nodes.remove(ip)
        gone_s = self._chance.uniform(0, 5)
        time.sleep(gone_s)
        self._nodes.add(ip, num_cpus=self._num_cpus)
        return f"raylet of {ip}; a new node took its place"

    def _head(self) -> str:
        killed_at = self._nodes.kill_head()
        while not self._nodes.is_head_alive():
            time.sleep(0.1)
        return f"all of the head; the control plane had it back after {time.time() - killed_at:.1f} s"

    def _supervisor(self) -> str:
        pids = self._nodes.pids_of("SupervisorActor")
        if not pids:
            return "there is none just now"
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
        return self._kill(self._chance.choice(spares)) if spares else "there is none just now"

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

    def _members(self) -> list[WorkerView]:
        return [one for one in self._workers() if one.rank is not None and one.pid]

    def _workers(self) -> list[WorkerView]:
        with self._server.client as client:
            return [one for job_id in self._job_ids for one in client.workers(job_id)]
