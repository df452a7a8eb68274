"""EmbeddedCluster: a local Ray cluster that `shoal serve` starts when it is given none.

Its processes are children in sessions of their own, so they outlive a control plane that is killed; the next control
plane finds them by the note in the state directory. A control plane that stops in an orderly way stops them, by pid.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pydantic import ValidationError

from shoal_workers.contract.base import Frozen

_STARTED = "Ray runtime started"
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 20.0
_OBJECT_STORE_BYTES = 100 << 20
"""Small: Shoal moves no tensors through Ray's object store."""


class _Note(Frozen):
    """What the next control plane must know of the cluster."""

    address: str
    pids: tuple[int, ...]
    """Leaders of the sessions, the head's first."""
    temp_dir: str


class EmbeddedClusterFailed(Exception):
    """Ray did not start; the message holds the end of what it printed."""


class EmbeddedCluster:
    """One head and any number of further raylets on this machine: 127.0.0.1, 127.0.0.2, ...

    `num_cpus` and `num_gpus` are those of all nodes together.
    """

    def __init__(self, state_dir: Path, *, num_cpus: int, num_gpus: int = 0, num_nodes: int = 1) -> None:
        self._state_dir = state_dir
        self._note_path = state_dir / "embedded-cluster.json"
        self.token_path = state_dir / "ray-token"
        self._num_cpus = num_cpus // num_nodes
        self._num_gpus = num_gpus // num_nodes
        self._num_nodes = num_nodes
        self.address = ""
        self._started = _Note(address="", pids=(), temp_dir="")
        self.adopted = False
        """True: the cluster was already running."""

    @property
    def environment(self) -> dict[str, str]:
        """What a driver's environment must hold *before* it imports ray, which reads it once.

        Token authentication; loopback, since Ray otherwise replaces 127.0.0.1 by the host's own address; and no
        niceness: Ray runs its workers at 15, and whatever else the machine does would come before the training.
        """
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_worker_niceness": "0",
        }

    def start(self) -> str:
        """Adopt the cluster that an earlier control plane left behind, or start one. Returns its address."""
        self._state_dir.mkdir(parents=True, exist_ok=True)
        note = self._read_note()
        if note is not None and all(_alive(pid) for pid in note.pids) and _answers(note.address):
            self.address, self.adopted = note.address, True
            return self.address
        self.stop()
        if not self.token_path.exists():
            self.token_path.touch(mode=0o600)
            self.token_path.write_text(secrets.token_hex(32))
        port = _free_port()
        self.address = f"127.0.0.1:{port}"
        temp_dir = tempfile.mkdtemp(prefix="shoal-ray-")  # short: Ray puts Unix sockets below it
        head = ["--head", f"--port={port}", f"--temp-dir={temp_dir}", "--include-dashboard=false",
                f"--ray-client-server-port={_free_port()}"]  # fmt: skip
        # The head's tables on disk, so that a head that dies alone can come back to living actors.
        gcs_store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{temp_dir}/gcs"}
        self._started = _Note(address=self.address, pids=(), temp_dir=temp_dir)
        self._launch(head, 0, gcs_store)
        for node in range(1, self._num_nodes):
            # without the variable Ray refuses a second node on loopback
            join = [f"--address={self.address}"]
            self._launch(join, node, {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"})
        return self.address

    def stop(self) -> None:
        """End the processes of the note and all that they started, and remove their temporary files.

        By SIGKILL: nothing here is worth saving, and Ray takes ten seconds and more over a SIGTERM.
        """
        note = self._read_note()
        if note is None:
            return
        for leader in reversed(note.pids):
            _end_session(leader)
        shutil.rmtree(note.temp_dir, ignore_errors=True)
        self._note_path.unlink(missing_ok=True)

    def _launch(self, arguments: list[str], node: int, extra_environment: dict[str, str]) -> None:
        """One `ray start --block`, the leader of its own session; returns when Ray says that it has started."""
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            f"--node-ip-address=127.0.0.{node + 1}",
            f"--num-cpus={self._num_cpus}",
            f"--num-gpus={self._num_gpus}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--dashboard-agent-listen-port=0",
            "--include-log-monitor=false",
            "--disable-usage-stats",
            *arguments,
        ]
        log_path = self._state_dir / f"ray-node-{node}.log"
        environment = {**os.environ, **self.environment, **extra_environment}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, env=environment,
            )  # fmt: skip
        self._started = self._started.model_copy(update={"pids": (*self._started.pids, process.pid)})
        self._write_note()  # at once: a control plane that is killed in mid-start leaves nothing unknown behind
        deadline = time.monotonic() + _START_TIMEOUT_S
        while _STARTED not in log_path.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                _end_session(process.pid)
                tail = log_path.read_text(errors="replace")[-2000:]
                raise EmbeddedClusterFailed(f"`ray start` did not come up; {log_path} ends with:\n{tail}")
            time.sleep(0.05)  # Ray offers nothing to wait for but its output

    def _read_note(self) -> _Note | None:
        try:
            return _Note.model_validate_json(self._note_path.read_text())
        except (FileNotFoundError, ValidationError):
            return None

    def _write_note(self) -> None:
        temporary = self._note_path.with_suffix(".tmp")
        temporary.write_text(self._started.model_dump_json())
        temporary.replace(self._note_path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError:
        return False
    return True


def _alive(pid: int) -> bool:
    """The process exists and is Ray's: a pid may have been given to somebody else since."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"ray.scripts" in command


def _end_session(leader: int) -> None:
    """Kill every process of the session, also those that moved to groups of their own, until none is left."""
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while members := _session_members(leader):
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            os.waitpid(leader, os.WNOHANG)
        except ChildProcessError:
            pass  # started by an earlier control plane
        if time.monotonic() > deadline:
            raise EmbeddedClusterFailed(f"processes {members} of the embedded cluster cannot be ended")
        time.sleep(0.02)


def _session_members(leader: int) -> list[int]:
    """Living processes of the session; zombies have ended."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
            except (OSError, ValueError):
                continue  # gone meanwhile
            if int(session) == leader and state != "Z":
                members.append(int(entry.name))
    return members
