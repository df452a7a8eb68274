"""EmbeddedCluster: a local Ray cluster that `shoal serve` starts when it is given none, and keeps alive.

Its processes lead sessions of their own, so they outlive a control plane that is killed; the next control plane finds
them by the note in the state directory. A control plane that stops in an orderly way stops them, by session.

    one node        head and workers are one: `ray start --head` with all the CPUs
    several nodes   a head without CPUs, and so many raylets at 127.0.0.2, 127.0.0.3, ...

`heal` starts the head again when it has died. Its tables (GCS) lie on disk: actors live on while it is away, and it
finds them again. If only its GCS process has died, only that is started, beside the running rest of the head.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from pydantic import ValidationError

from shoal_service.ray_environment import CLUSTER_ENVIRONMENT
from shoal_service.sessions import SessionsRemain, command_of, end_session, free_port, listens, session_members
from shoal_workers.contract.base import Frozen

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 120.0
_OBJECT_STORE_BYTES = 100 << 20
"""Small: Shoal moves no tensors through Ray's object store."""
_GCS = "/gcs_server"
_RAYLET = "/raylet/raylet"
_HEAD = 0


class _Node(Frozen):
    """One `ray start`. Number 0 is the head."""

    number: int
    sessions: tuple[int, ...] = ()
    """Every session that was started for it."""


class _Note(Frozen):
    """What the next control plane must know of the cluster."""

    address: str
    pids: tuple[int, ...]
    """Leaders of all sessions, the head's first."""
    temp_dir: str
    client_port: int = 0
    nodes: tuple[_Node, ...] = ()
    gcs_command: tuple[str, ...] = ()
    """How the head's GCS process was started."""


class EmbeddedClusterFailed(Exception):
    """Ray did not start; the message holds the end of what it printed."""


class EmbeddedCluster:
    """`num_cpus` and `num_gpus` are those of all nodes together. Thread-safe: one call waits for another."""

    def __init__(self, state_dir: Path, *, num_cpus: int, num_gpus: int = 0, num_nodes: int = 1) -> None:
        self._state_dir = state_dir
        self._note_path = state_dir / "embedded-cluster.json"
        self.token_path = state_dir / "ray-token"
        self._num_cpus = num_cpus // num_nodes
        self._num_gpus = num_gpus // num_nodes
        self._num_nodes = num_nodes
        self.address = ""
        self._note = _Note(address="", pids=(), temp_dir="")
        self._lock = threading.Lock()
        self._is_stopped = False
        self.adopted = False
        """True: the cluster was already running."""

    @property
    def environment(self) -> dict[str, str]:
        """What a driver's environment must hold *before* it imports ray, which reads it once.

        Token authentication; and loopback, since Ray otherwise replaces 127.0.0.1 by the host's own address.
        """
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            **CLUSTER_ENVIRONMENT,
        }

    def start(self) -> str:
        """Adopt the cluster that an earlier control plane left behind, or start one. Returns its address."""
        with self._lock:
            self._is_stopped = False
            return self._start()

    def heal(self) -> bool:
        """Start the head again if it has died, and the nodes if all of them have; True: something was started.

        One dead node of several stays dead, as a machine would. Only after `start`; does nothing after `stop`.
        """
        with self._lock:
            return not self._is_stopped and self._heal()

    def stop(self) -> None:
        """End the processes of the note and all that they started, and remove their temporary files.

        By SIGKILL: nothing here is worth saving, and Ray takes ten seconds and more over a SIGTERM.
        """
        with self._lock:
            self._is_stopped = True
            self._stop()

    def _start(self) -> str:
        self._state_dir.mkdir(parents=True, exist_ok=True)
        note = self._read_note()
        if note is not None and any(_is_alive(node, _RAYLET) for node in note.nodes):
            self._note, self.address, self.adopted = note, note.address, True
            self._heal()
            return self.address
        self._stop()
        if not self.token_path.exists():
            self.token_path.touch(mode=0o600)
            self.token_path.write_text(secrets.token_hex(32))
        self.address = f"127.0.0.1:{free_port()}"
        temp_dir = tempfile.mkdtemp(prefix="shoal-ray-")  # short: Ray puts Unix sockets below it
        nodes = tuple(_Node(number=n) for n in range(1 if self._num_nodes == 1 else self._num_nodes + 1))
        self._note = _Note(address=self.address, pids=(), temp_dir=temp_dir, client_port=free_port(), nodes=nodes)
        self._start_nodes(range(len(nodes)))
        return self.address

    def _heal(self) -> bool:
        nodes = self._note.nodes
        dead = [node.number for node in nodes if not _is_alive(node, _RAYLET)]
        has_workers = len(dead) < len(nodes) and dead != [node.number for node in nodes[1:]]
        revived = [number for number in dead if number == _HEAD or not has_workers]
        is_headless = not _is_alive(nodes[_HEAD], _GCS)
        if not revived and not is_headless:
            return False
        _log.warning("the embedded Ray cluster is healed", extra={"nodes": revived, "is_headless": is_headless})
        if is_headless and _HEAD not in revived:
            self._start_gcs()
        self._start_nodes(revived)
        return True

    def _stop(self) -> None:
        note = self._read_note()
        if note is None:
            return
        for leader in reversed(note.pids):
            if _is_ray(leader):
                _end(leader)
        shutil.rmtree(note.temp_dir, ignore_errors=True)
        self._note_path.unlink(missing_ok=True)

    def _start_nodes(self, numbers: list[int] | range) -> None:
        """The head before all others, which then start side by side."""
        if _HEAD in numbers:
            self._finish(_HEAD, self._launch(_HEAD))
            gcs = _members(self._note.nodes[_HEAD], _GCS)
            self._note = self._note.model_copy(update={"gcs_command": command_of(gcs[0])})
            self._write_note()
        starting = {number: self._launch(number) for number in numbers if number != _HEAD}
        for number, process in starting.items():
            self._finish(number, process)

    def _launch(self, number: int) -> subprocess.Popen[bytes]:
        """One `ray start`, the leader of its own session. It ends when its node is up; its children stay behind: with
        `--block` it would end them all when one of them dies, and the GCS could not be started again alone."""
        for leader in self._note.nodes[number].sessions:
            _end(leader)  # what may be left of the node's last life
        alone = self._num_nodes == 1
        cpus, gpus = (0, 0) if number == _HEAD and not alone else (self._num_cpus, self._num_gpus)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start"),
            f"--node-ip-address=127.0.0.{number + 1}",
            f"--num-cpus={cpus}",
            f"--num-gpus={gpus}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--dashboard-agent-listen-port=0",
            "--include-log-monitor=false",
            "--disable-usage-stats",
            *(self._head_arguments() if number == _HEAD else self._join_arguments()),
        ]
        environment = {**os.environ, **self.environment, **(self._gcs_store if number == _HEAD else _JOIN_ENVIRONMENT)}
        return self._spawn(number, command, environment, self._log_path(number))

    def _head_arguments(self) -> tuple[str, ...]:
        port = self.address.rpartition(":")[2]
        return (
            *("--head", f"--port={port}", f"--temp-dir={self._note.temp_dir}", "--include-dashboard=false"),
            f"--ray-client-server-port={self._note.client_port}",
        )

    def _join_arguments(self) -> tuple[str, ...]:
        """The head's address as IPv6: Ray replaces the IPv4 one by the host's own, where the head does not listen."""
        return (f"--address=[::ffff:127.0.0.1]:{self.address.rpartition(':')[2]}",)

    @property
    def _gcs_store(self) -> dict[str, str]:
        """The head's tables on disk, so that a head that dies alone can come back to living actors."""
        return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{self._note.temp_dir}/gcs"}

    def _finish(self, number: int, process: subprocess.Popen[bytes]) -> None:
        try:
            status = process.wait(_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            _end(process.pid)
            path = self._log_path(number)
            tail = path.read_text(errors="replace")[-2000:]
            raise EmbeddedClusterFailed(f"`ray start` did not come up; {path} ends with:\n{tail}")

    def _start_gcs(self) -> None:
        environment = {**os.environ, **self.environment, **self._gcs_store}
        self._spawn(_HEAD, list(self._note.gcs_command), environment, self._state_dir / "ray-gcs.log")
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not listens(self.address):
            if time.monotonic() > deadline:
                raise EmbeddedClusterFailed(f"the GCS does not listen at {self.address}")
            time.sleep(0.05)  # another process's socket: there is nothing to wait for

    def _spawn(
        self, number: int, command: list[str], environment: dict[str, str], log_path: Path
    ) -> subprocess.Popen[bytes]:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, env=environment,
            )  # fmt: skip
        nodes = tuple(
            node.model_copy(update={"sessions": (*(s for s in node.sessions if session_members(s)), process.pid)})
            if node.number == number
            else node
            for node in self._note.nodes
        )
        pids = tuple(session for node in nodes for session in node.sessions)
        self._note = self._note.model_copy(update={"nodes": nodes, "pids": pids})
        self._write_note()  # at once: a control plane that is killed in mid-start leaves nothing unknown behind
        return process

    def _log_path(self, number: int) -> Path:
        return self._state_dir / f"ray-node-{number}.log"

    def _read_note(self) -> _Note | None:
        try:
            return _Note.model_validate_json(self._note_path.read_text())
        except (FileNotFoundError, ValidationError):
            return None

    def _write_note(self) -> None:
        temporary = self._note_path.with_suffix(".tmp")
        temporary.write_text(self._note.model_dump_json())
        temporary.replace(self._note_path)


_JOIN_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
"""Without it Ray refuses a second node on loopback."""


def _is_alive(node: _Node, program: str) -> bool:
    return bool(_members(node, program))


def _members(node: _Node, program: str) -> list[int]:
    """Pids of a node's processes that run this program."""
    return [
        pid
        for session in node.sessions
        for pid in session_members(session)
        if command_of(pid)[:1] and command_of(pid)[0].endswith(program)
    ]


def _is_ray(leader: int) -> bool:
    """The number may have been given to somebody else's session since the note was written."""
    return any("ray" in part for pid in session_members(leader) for part in command_of(pid)[:3])


def _end(leader: int) -> None:
    try:
        end_session(leader)
    except SessionsRemain as error:
        raise EmbeddedClusterFailed(str(error)) from error
