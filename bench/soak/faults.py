"""The faults of the matrix, and hangs, drains and network cuts, as operations on a running cluster.

main.py decides which fault happens when. Each operation undoes its fault (a killed server runs again, a removed node is
back, a link is up) and then returns the text for the timeline. Whether training continues is checked afterwards.

    embedded cluster   all faults of the matrix, hang, drain
    hosts              network namespaces with a node each: those that need no embedded cluster, and cut
"""

from __future__ import annotations

import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from kit.processes.hosts import Hosts
from kit.processes.os_processes import is_alive, send
from kit.processes.ray_nodes import HEAD
from shoal_server import ShoalServer
from shoal_service.views import WorkerView

_HANG_PATIENCE_S = 60.0
_MATRIX = Path(__file__).parents[2] / "tests" / "chaos" / "fault_matrix.yaml"
_ALSO = ("hang", "drain")
_MATRIX_ONLY = ("storage_hangs",)
"""Faults that need the name of the next checkpoint of a held group."""
_CUT = "cut"
_EMBEDDED_ONLY = ("node", "head")
_BOUNDS = {"hang": 1, "drain": 0, _CUT: 1}


def fault_names(*, on_hosts: bool = False) -> list[str]:
    """The faults that a kind of cluster permits."""
    faults = yaml.safe_load(_MATRIX.read_text())["faults"]
    found = [*(name for name in faults if name not in _MATRIX_ONLY), *_ALSO]
    return [name for name in found if name not in _EMBEDDED_ONLY] + [_CUT] if on_hosts else found


def steps_bound(fault: str) -> int:
    """Completed steps that one such fault costs at most, from the matrix."""
    faults = yaml.safe_load(_MATRIX.read_text())["faults"]
    return int(faults[fault]["steps_lost"]) if fault in faults else _BOUNDS[fault]


class Strikes:
    """`state_dir`: the control plane's directory, with its database and checkpoints."""

    def __init__(
        self,
        server: ShoalServer,
        state_dir: Path,
        job_ids: list[str],
        chance: random.Random,
        num_cpus: int,
        hosts: Hosts | None = None,
    ) -> None:
        """`num_cpus`: CPUs of each node. `hosts`: the cluster, if it is not the embedded one."""
        self._hosts = hosts
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
            "hang": self._hang,
            "drain": self._drain,
            _CUT: self._cut,
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

    def supervisors(self) -> list[int]:
        """Pids of the supervisors."""
        if self._hosts is not None:
            return list(self._hosts.pids_of("SupervisorActor"))
        return self._nodes.pids_of("SupervisorActor")

    def _hang(self) -> str:
        """Stops a worker, which the supervisor then kills. The worker is continued afterwards in case it was spared."""
        found = self._ranked()
        if not found:
            return "no worker trains at the moment"
        worker = self._chance.choice(found)
        send(worker.pid, signal.SIGSTOP)
        deadline = time.monotonic() + _HANG_PATIENCE_S
        while is_alive(worker.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        text = f"rank {worker.rank} of {worker.worker_id} (pid {worker.pid}) stopped"
        if not is_alive(worker.pid):
            return f"{text}; it was replaced"
        send(worker.pid, signal.SIGCONT)
        return f"{text} for {_HANG_PATIENCE_S:.0f} s, and continued"

    def _drain(self) -> str:
        found = self._ranked()
        if not found:
            return "no worker trains at the moment"
        worker = self._chance.choice(found)
        drained_s = self._chance.uniform(3, 8)
        with self._server.client as client:
            client.drain(worker.node_id, reason="soak")
            try:
                time.sleep(drained_s)
            finally:
                client.undo_drain(worker.node_id)
        return f"{worker.node_ip} for {drained_s:.1f} s"

    def _cut(self) -> str:
        """Takes down the link of a host without a supervisor. After it is up again, a new node starts there."""
        assert self._hosts is not None
        supervisors = set(self._hosts.pids_of("SupervisorActor").values())
        found = sorted({one.node_ip for one in self._ranked()} - supervisors)
        if not found:
            return "every worker is beside a supervisor"
        ip = self._chance.choice(found)
        self._hosts.cut(ip)
        cut_s = self._chance.uniform(5, 15)
        time.sleep(cut_s)
        self._hosts.heal(ip)
        time.sleep(self._chance.uniform(0, 5))
        self._hosts.launch(ip)
        return f"link of {ip} down for {cut_s:.1f} s; then a new node there"

    def _supervisor(self) -> str:
        pids = self.supervisors()
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
