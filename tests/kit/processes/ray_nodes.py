"""The nodes of an embedded Ray cluster, to be killed and added: a head, and raylets at 127.0.0.2, 127.0.0.3, ...

Reads the note that `EmbeddedCluster` writes, of a `shoal serve --nodes N` or of a benchmark's own cluster. Ends only
the nodes that were added here; the caller ends the cluster. Used by the recovery benchmark, the soak and the fault
matrix.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.processes.os_processes import end_session, send, session_members
from shoal_service.cluster.embedded_cluster import EmbeddedCluster

HEAD = "127.0.0.1"
_START_TIMEOUT_S = 90.0


class Nodes:
    """Operations on the nodes of a cluster, by address."""

    def __init__(self, state_dir: Path, python: Path = Path(sys.executable)) -> None:
        """`python`: the interpreter of added nodes and of their workers."""
        self._state_dir = state_dir
        self._python = python
        self._added: dict[str, int] = {}
        """Address -> session of the newest node that was added there."""
        self._blocked: list[subprocess.Popen[bytes]] = []
        """The `ray start` of nodes that were added with `block`."""

    @property
    def address(self) -> str:
        """host:port of the head."""
        return str(self._note()["address"])

    @property
    def temp_dir(self) -> Path:
        return Path(self._note()["temp_dir"])

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a driver or node of the cluster."""
        return {**EmbeddedCluster(self._state_dir, num_cpus=1).environment, "OMP_NUM_THREADS": "1"}

    def ips(self) -> list[str]:
        """Addresses of all nodes that ever existed, the head first."""
        return sorted(self._sessions())

    def sessions(self, ip: str) -> list[int]:
        """Sessions of a node's processes; empty if there never was such a node."""
        return self._sessions().get(ip, [])

    def ip_of(self, pid: int) -> str | None:
        """Address of the node that a process belongs to."""
        try:
            session = os.getsid(pid)
        except ProcessLookupError:
            return None
        return next((ip for ip, sessions in self._sessions().items() if session in sessions), None)

    def pids_of(self, actor: str) -> list[int]:
        """Pids of the actors of a class, over all nodes."""
        return [pid for ip in self.ips() for pid, command in self._processes(ip) if command.startswith(f"ray::{actor}")]

    def raylet_pid(self, ip: str) -> int:
        [pid] = [pid for pid, command in self._processes(ip) if "/raylet/raylet " in f"{command} "]
        return pid

    def kill_raylet(self, ip: str) -> float:
        """Send SIGKILL to a node's raylet only; its workers then exit. Returns the time of the signal.

        The raylet is reaped if it has become a child of this process: Ray's workers treat a zombie as alive.
        """
        pid = self.raylet_pid(ip)
        at = send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        return at

    def kill_head(self) -> float:
        """Send SIGKILL to every process of the head; returns the time. The control plane restarts the head."""
        at = time.time()
        self.remove(HEAD)
        return at

    def is_alive(self, ip: str) -> bool:
        """Whether the node's raylet runs. Other nodes may not have reconnected to it yet."""
        return any("/raylet/raylet " in f"{command} " for _, command in self._processes(ip))

    def is_head_alive(self) -> bool:
        return self.is_alive(HEAD)

    def remove(self, ip: str) -> None:
        """End all processes of a node."""
        for session in self.sessions(ip):
            end_session(session)

    def add(self, ip: str, *, num_cpus: int, block: bool = False, labels: str = "") -> float:
        """Start a node, also at the address of one that is gone; returns the time at which it was up.

        Args:
            block: `ray start` stays, as the main process of a machine or pod, and is not waited for.
            labels: for example "rack=r1".
        """
        command: Sequence[str] = [
            *(str(self._python), "-m", "ray.scripts.scripts", "start", f"--node-ip-address={ip}"),
            # As IPv6: Ray replaces the IPv4 address by the host's own address, on which the head does not listen.
            *(f"--address=[::ffff:127.0.0.1]:{self.address.rpartition(':')[2]}", f"--num-cpus={num_cpus}"),
            *("--object-store-memory=104857600", "--dashboard-agent-listen-port=0", "--include-log-monitor=false"),
            "--disable-usage-stats",
            *(["--block"] if block else []),
            *([f"--labels={labels}"] if labels else []),
        ]
        environment = {**os.environ, **self.environment, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
        log_path = self._state_dir / f"added-{ip}.log"
        log_path.touch(mode=0o600)  # beside the files of a service, which are their owner's alone
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
            )
        self._added[ip] = process.pid
        if block:
            self._blocked.append(process)
        if not block and process.wait(_START_TIMEOUT_S) != 0:
            raise RuntimeError(f"node {ip} did not start:\n{log_path.read_text(errors='replace')[-2000:]}")
        return time.time()

    def terminate(self, ip: str) -> None:
        """Send SIGTERM to the `ray start` of a node that was added with `block`, as its platform does."""
        os.kill(self._added[ip], signal.SIGTERM)

    def end_added(self) -> None:
        for session in self._added.values():
            end_session(session)
        for process in self._blocked:
            process.wait()

    def _processes(self, ip: str) -> list[tuple[int, str]]:
        return [found for session in self.sessions(ip) for found in session_members(session).items()]

    def _sessions(self) -> dict[str, list[int]]:
        """Read from the note at each call: a control plane that repairs its cluster changes the sessions."""
        found = {f"127.0.0.{node['number'] + 1}": list(node["sessions"]) for node in self._note()["nodes"]}
        for ip, session in self._added.items():
            found.setdefault(ip, []).append(session)
        return found

    def _note(self) -> dict[str, Any]:
        note: dict[str, Any] = json.loads((self._state_dir / "embedded-cluster.json").read_text())
        return note
