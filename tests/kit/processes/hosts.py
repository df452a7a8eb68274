"""Hosts within one machine: network namespaces on a bridge, a Ray node in each. A host's link can be taken down.

    10.201.77.1    the bridge, in the machine's own namespace: Ray's head without CPUs, and `shoal serve`
    10.201.77.11   the first host; 10.201.77.12 the second; and so on

Needs root and the capability NET_ADMIN; `why_not` names what is missing.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kit.processes.os_processes import end_session, session_members
from shoal_service.cluster.connects import find_free_port
from shoal_service.cluster.embedded_cluster import EmbeddedCluster

_SUBNET = "10.201.77"
_BRIDGE = "shoalbr0"
_STARTS = 3
_START_TIMEOUT_S = 90.0


def why_not() -> str | None:
    """The reason why hosts cannot be created on this machine, or None."""
    if shutil.which("ip") is None:
        return "the program `ip` is not installed"
    name = f"shoalprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"`ip netns add` failed: {made.stderr.strip()}"
    veth = ["ip", "link", "add", f"{name[:11]}a", "type", "veth", "peer", "name", f"{name[:11]}b"]
    linked = subprocess.run(veth, capture_output=True, text=True)
    if not linked.returncode:
        _ip("link", "del", f"{name[:11]}a")
    _ip("netns", "del", name)
    return f"`ip link add type veth` failed: {linked.stderr.strip()}" if linked.returncode else None


class Hosts:
    """A cluster whose nodes can be disconnected. Call `end` in a `finally`."""

    def __init__(self, folder: Path, *, num_hosts: int, cpus_per_host: int) -> None:
        self._folder = folder
        self._num_cpus = cpus_per_host
        self._names = {f"{_SUBNET}.{11 + number}": f"shoalhost{number}" for number in range(num_hosts)}
        self._sessions: dict[str, int] = {}
        self._temp_dir = Path(tempfile.mkdtemp(prefix="shoal-ray-"))
        self._port = find_free_port()

    @property
    def address(self) -> str:
        return f"{_SUBNET}.1:{self._port}"

    @property
    def serve_options(self) -> list[str]:
        """What a `shoal serve` needs to run jobs here: supervisors on the hosts report to it across the bridge."""
        return [f"--ray-address={self.address}", "--host=0.0.0.0", "--allow-plain-http"]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a driver of the cluster; the same settings as for Shoal's embedded clusters."""
        return {**EmbeddedCluster(self._folder, num_cpus=1).environment, "OMP_NUM_THREADS": "1"}

    @property
    def ips(self) -> tuple[str, ...]:
        return tuple(self._names)

    def namespace(self, ip: str) -> str:
        """Name of a host's network namespace; its link in there is `eth0`."""
        return self._names[ip]

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        token = self._folder / "ray-token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self._make_network()
        head = ["--head", f"--port={self._port}", f"--temp-dir={self._temp_dir}", "--include-dashboard=false"]
        store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self._temp_dir / "gcs")}
        self._launch(f"{_SUBNET}.1", [*head, "--num-cpus=0"], store)
        for ip in self._names:
            self.launch(ip)

    def cut(self, ip: str) -> float:
        """Take the host's link down; returns the time at which that was done."""
        at = time.time()
        _ip("link", "set", f"{self._names[ip]}v", "down")
        return at

    def launch(self, ip: str) -> None:
        """Start a Ray node on this host, after the processes of the previous one are killed."""
        if ip in self._sessions:
            end_session(self._sessions[ip])
        self._launch(ip, [f"--address={self.address}", f"--num-cpus={self._num_cpus}"], {})

    def heal(self, ip: str) -> None:
        _ip("link", "set", f"{self._names[ip]}v", "up")

    def pids_of(self, actor: str) -> dict[int, str]:
        """Pid -> host address, for the actors of a class."""
        return {
            pid: ip
            for ip, session in self._sessions.items()
            for pid, command in session_members(session).items()
            if command.startswith(f"ray::{actor}")
        }

    def end(self) -> None:
        for session in self._sessions.values():
            end_session(session)
        for name in self._names.values():
            _ip("netns", "del", name)
            _ip("link", "del", f"{name}v")
        _ip("link", "del", _BRIDGE)
        shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _make_network(self) -> None:
        _ip("link", "add", _BRIDGE, "type", "bridge", check=True)
        _ip("addr", "add", f"{_SUBNET}.1/24", "dev", _BRIDGE, check=True)
        _ip("link", "set", _BRIDGE, "up", check=True)
        for ip, name in self._names.items():
            _ip("netns", "add", name, check=True)
            _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name, check=True)
            _ip("link", "set", f"{name}v", "master", _BRIDGE, check=True)
            _ip("link", "set", f"{name}v", "up", check=True)
            _ip("-n", name, "addr", "add", f"{ip}/24", "dev", "eth0", check=True)
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up", check=True)

    def _launch(self, ip: str, arguments: list[str], extra: dict[str, str]) -> None:
        inside = ["ip", "netns", "exec", self._names[ip]] if ip in self._names else []
        command = [
            *inside,
            *(sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={ip}"),
            *("--object-store-memory=104857600", "--dashboard-agent-listen-port=0", "--include-log-monitor=false"),
            *("--disable-usage-stats", *arguments),
        ]
        environment = {**os.environ, **self.environment, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", **extra}
        log_path = self._folder / f"ray-{ip}.log"
        for left in reversed(range(_STARTS)):
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
                )
            self._sessions[ip] = process.pid
            if process.wait(_START_TIMEOUT_S) == 0:
                return
            said = log_path.read_text(errors="replace")
            # Ray gives a raylet 30 s to register, which a machine with a load of 30 on two cores does not always keep
            if not left or "timed out during startup" not in said:
                raise RuntimeError(f"host {ip} did not start:\n{said[-2000:]}")
            end_session(process.pid)


def _ip(*arguments: str, check: bool = False) -> None:
    with contextlib.suppress(subprocess.CalledProcessError) if not check else contextlib.nullcontext():
        subprocess.run(["ip", *arguments], check=True, capture_output=True)
