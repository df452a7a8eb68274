"""Describes the nodes of the embedded cluster, and finds and ends their processes.

A node has an entry in the note, a `ray start` command and one session for each start. A session outlives its leader,
and its number is not reused while one of its processes lives, so the processes of an earlier control plane are found
in /proc by it. `EmbeddedCluster` starts the nodes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from shoal_workers.contract import Frozen
from shoal_workers.forkserver.orphans import parents

GCS = "/gcs_server"
RAYLET = "/raylet/raylet"
HEAD = 0
_OBJECT_STORE_BYTES = 100 << 20
"""Small, because Shoal moves no tensors through Ray's object store."""


class EmbeddedNode(Frozen):
    """One `ray start`. Number 0 is the head."""

    number: int
    sessions: tuple[int, ...] = ()
    """Number of each session that was started for the node."""
    has_been_up: bool = False
    """True if the node has joined the cluster since its last start."""

    @property
    def ip(self) -> str:
        return f"127.0.0.{self.number + 1}"

    def runs(self, program: str) -> bool:
        return next(self.find_pids(program), None) is not None

    def has_lost(self, program: str) -> bool:
        """Return whether such a process has died while the `ray start` that started it still waits for it."""
        return any(program.endswith(f"/{name}") for session in self.sessions for name in find_zombie_names(session))

    def find_pids(self, program: str) -> Iterator[int]:
        """Yield the pids of the node's processes that run this program."""
        for session in self.sessions:
            for pid in find_session_pids(session):
                if read_command(pid)[:1] and read_command(pid)[0].endswith(program):
                    yield pid


class EmbeddedNote(Frozen):
    """What the next control plane reads of the cluster: a JSON file in the state directory."""

    address: str
    pids: tuple[int, ...]
    """Leaders of all sessions, the head's first."""
    temp_dir: str
    client_port: int = 0
    nodes: tuple[EmbeddedNode, ...] = ()
    gcs_command: tuple[str, ...] = ()
    """How the head's GCS process was started."""
    user: str = ""
    """Name of the account of its processes; empty: that of the server."""

    @staticmethod
    def read(path: Path) -> EmbeddedNote | None:
        """Read the note; None if there is none, or if it is not valid."""
        try:
            return EmbeddedNote.model_validate_json(path.read_text())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        with open_private_file(temporary) as file:
            file.write(self.model_dump_json().encode())
        temporary.replace(path)

    def with_node(self, changed: EmbeddedNode) -> EmbeddedNote:
        nodes = tuple(changed if node.number == changed.number else node for node in self.nodes)
        pids = tuple(session for node in nodes for session in node.sessions)
        return self.model_copy(update={"nodes": nodes, "pids": pids})


def make_start_command(note: EmbeddedNote, node: EmbeddedNode, *, num_cpus: int, num_gpus: int) -> list[str]:
    """Return the `ray start` command of a node. It ends when the node is up, and its child processes stay.

    With `--block` it would end all of them when one dies, and the GCS could not be started again alone.
    """
    port = note.address.rpartition(":")[2]
    if node.number == HEAD:
        # the autoscaler has nothing to scale, and would take processor time from the raylet while that starts
        part = ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
        part.append(f"--ray-client-server-port={note.client_port}")
    else:  # Ray replaces an IPv4 loopback address by one at which no head listens
        part = [f"--address=[::ffff:127.0.0.1]:{port}"]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start"),
        f"--node-ip-address={node.ip}",
        f"--num-cpus={num_cpus}",
        f"--num-gpus={num_gpus}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        # In a shared directory Ray names a raylet's socket by the first unused number, and binds it seconds later: of
        # two nodes that started at the same time one died of `Address already in use`. Ray opens it to everybody
        # (0777), but not the one above.
        f"--temp-dir={note.temp_dir}/{node.number}",
        "--dashboard-agent-listen-port=0",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        *part,
    ]


def open_private_file(path: Path) -> IO[bytes]:
    """Open an emptied file for writing. Only the owner may read it, also if it existed with another mode."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "wb")


def find_raylets(address: str) -> list[int]:
    """Return the pids of all raylets of the cluster on this machine, also of those that others started.

    Reads the command of every process.
    """
    port = address.rpartition(":")[2]
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and (command := read_command(int(entry.name)))
        and command[0].endswith(RAYLET)
        and any(part.startswith("--gcs-address=") and part.endswith(f":{port}") for part in command)
    ]


def make_start_environment(note: EmbeddedNote, node: EmbeddedNode) -> dict[str, str]:
    """Return the variables of this node, besides those of every process of the cluster."""
    return make_gcs_environment(note) if node.number == HEAD else _JOIN_ENVIRONMENT


def make_gcs_environment(note: EmbeddedNote) -> dict[str, str]:
    """Return variables that keep the head's tables on disk: a new head then finds the live actors."""
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{note.temp_dir}/gcs"}


_JOIN_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
"""Ray refuses a second node on loopback without it."""


_STOP_TIMEOUT_S = 20.0


class EmbeddedClusterFailed(Exception):
    """Ray did not start, and the message contains the end of its output; or some of its processes cannot be ended."""


def find_session_pids(leader: int) -> list[int]:
    """Return the pids of the session's live processes. A zombie does not count."""
    return [pid for pid in _iterate_session(leader) if _read_stat(pid)[1] not in ("Z", "")]


def find_zombie_names(leader: int) -> list[str]:
    """Return the names of the session's zombies; the kernel cuts a name to 15 letters."""
    return [name for pid in _iterate_session(leader) for name, state in [_read_stat(pid)] if state == "Z"]


def read_command(pid: int) -> tuple[str, ...]:
    """Return the command line of a process; empty if it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(command.decode(errors="replace").split("\0")[:-1])


def end_session(leader: int) -> None:
    """Kill every process of the session, of any process group, until none is left.

    A task may have started processes in other sessions: these are killed too.
    """
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while pids := find_session_pids(leader):
        for pid in [*_find_descendants(pids), *pids]:  # before their ancestors, by which they are found
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(leader)
        if time.monotonic() > deadline:
            raise EmbeddedClusterFailed(f"processes {pids} of session {leader} cannot be ended")
        time.sleep(0.02)
    _reap(leader)


def _iterate_session(leader: int) -> Iterator[int]:
    """Yield the pids of the session, with one system call per process.

    Reading each `stat` file took 20 ms per call, once a second for each node.
    """
    for entry in Path("/proc").iterdir():
        with suppress(ProcessLookupError):  # it has ended since
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                yield int(entry.name)


def _find_descendants(pids: list[int]) -> list[int]:
    """Return the descendants of these processes that are in another session."""
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    descendants, left = [], [*pids]
    while left:
        left = [child for pid in left for child in children.get(pid, ()) if child not in pids]
        descendants += left
    return descendants


def _read_stat(pid: int) -> tuple[str, str]:
    """Return the name and the state (one letter) of a process; empty if it has ended."""
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    except OSError:
        return "", ""
    return head.partition("(")[2], tail[:1]


def _reap(leader: int) -> None:
    with suppress(ChildProcessError):  # started by an earlier control plane
        os.waitpid(leader, os.WNOHANG)
