"""EmbeddedCluster: a local Ray cluster that `shoal serve` starts when it is given none, and keeps alive.

Its processes lead sessions of their own, so they outlive a control plane that is killed; the next control plane finds
them by the note in the state directory. A control plane that stops in an orderly way stops them, by session.

    one node        the head is also the node of the workers: `ray start --head` with all CPUs
    several nodes   a head without CPUs, and one raylet per node at 127.0.0.2, 127.0.0.3, ...

`start` returns when every node is registered and its raylet runs. A node that does not come up is started again, up to
three times; a node that stays away is named in the log and in `away`, and the cluster goes on without it.

With an `account` all of them run as another user than this process (isolation.py).

`heal` starts the head again when it has died. Its tables (GCS) are on disk: actors live on while it is away, and it
finds them again. If only its GCS process has died, only that process is started again. Another dead node is started
again after a pause (core/node_restarts.py), unless `leave_dead_nodes`.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from shoal_service.cluster.connects import free_port, listens
from shoal_service.cluster.embedded_node import (
    GCS,
    HEAD,
    RAYLET,
    EmbeddedClusterFailed,
    EmbeddedNode,
    EmbeddedNote,
    command_of,
    end_session,
    gcs_environment,
    pids_of_session,
    private_file,
    raylets_of,
    start_command,
    start_environment,
)
from shoal_service.cluster.isolation import Account
from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT, inherited
from shoal_service.core.node_restarts import NodeLife, seen, started, starts_at

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 120.0
_MAX_STARTS = 3
"""Starts of one node before the cluster goes on without it."""
_RESTART_TIMEOUT_S = 30.0
"""Time for the restart of one node beside a running cluster. Meanwhile `heal` cannot look after the head."""
_CHECK_S = 0.1


class EmbeddedCluster:
    """`num_cpus` and `num_gpus` are totals over all nodes. Thread-safe: calls wait for each other."""

    def __init__(
        self,
        state_dir: Path,
        *,
        num_cpus: int,
        num_gpus: int = 0,
        num_nodes: int = 1,
        leave_dead_nodes: bool = False,
        account: Account | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """
        Args:
            leave_dead_nodes: for experiments, in which a dead node stays away like a dead machine.
            account: the user that runs Ray, who cannot read `state_dir`; without it, the user of this process.
            say: called with one line for people when a node has come up.
        """
        self._state_dir = state_dir
        self._note_path = state_dir / "embedded-cluster.json"
        self.token_path = state_dir / "ray-token"
        self._num_cpus = num_cpus // num_nodes
        self._num_gpus = num_gpus // num_nodes
        self._num_nodes = num_nodes
        self._leave_dead_nodes = leave_dead_nodes
        self._account = account
        self._monotonic = monotonic
        self._say = say
        self._lives: dict[int, NodeLife] = {}
        """Nodes by number; the head is not among them."""
        self.address = ""
        self._note = EmbeddedNote(address="", pids=(), temp_dir="")
        self._lock = threading.Lock()
        self._is_stopped = False
        """A start that is under way reads it too, and then ends."""
        self._away: tuple[str, ...] = ()
        self.adopted = False
        """True if the cluster was already running."""

    @property
    def environment(self) -> dict[str, str]:
        """What a driver's environment must contain before it imports ray, which reads it once.

        Token authentication, and loopback: Ray otherwise replaces 127.0.0.1 by the host's own address. Another user
        cannot read the token's file, so its processes have the token itself.
        """
        token = {"RAY_AUTH_TOKEN_PATH": str(self.token_path)}
        if self._account is not None:
            token = {"RAY_AUTH_TOKEN": self._token()}
        return {
            "RAY_AUTH_MODE": "token",
            **token,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            **CLUSTER_ENVIRONMENT,
        }

    @property
    def away(self) -> tuple[str, ...]:
        """Addresses of the nodes without a live raylet, at the end of the last `start` or `heal`. From any thread."""
        return self._away

    def start(self) -> str:
        """Adopt the running cluster of an earlier control plane, or start one. Returns its address.

        Raises:
            EmbeddedClusterFailed: the head did not come up, or none of the other nodes did, or `stop` was called.
        """
        with self._lock:
            self._is_stopped = False
            try:
                return self._start()
            finally:
                self._check_away()

    def heal(self) -> bool:
        """Starts the head if it has died, the nodes if all of them have died, and one dead node of several after its
        pause. Returns whether something was started. Call it after `start`; after `stop` it does nothing."""
        with self._lock:
            if self._is_stopped:
                return False
            try:
                return self._heal()
            finally:
                self._check_away()

    def stop(self) -> None:
        """Ends all processes of the note's sessions with SIGKILL, and removes their temporary files. There is nothing
        to save, and Ray takes ten seconds and more after a SIGTERM."""
        self._is_stopped = True
        with self._lock:
            self._stop()

    def _start(self) -> str:
        self._state_dir.mkdir(parents=True, exist_ok=True)
        note = EmbeddedNote.read(self._note_path)
        user = self._account.name if self._account is not None else ""
        if note is not None and note.user == user and any(node.runs(RAYLET) for node in note.nodes):
            self._note, self.address, self.adopted = note, note.address, True
            self._heal()
            self._start_nodes(node.number for node in self._note.nodes if not node.has_been_up)
            return self.address
        self._stop()
        self._token()
        self.address = f"127.0.0.1:{free_port()}"
        # A short path, because Ray puts Unix sockets below it. It is 0700; Ray opens its own directories to everybody.
        temp_dir = tempfile.mkdtemp(prefix="shoal-ray-")
        if self._account is not None:
            os.chown(temp_dir, self._account.uid, self._account.gid)
            Path(temp_dir).chmod(0o750)  # the gateway is in this group
        nodes = tuple(EmbeddedNode(number=n) for n in range(1 if self._num_nodes == 1 else self._num_nodes + 1))
        self._note = EmbeddedNote(
            address=self.address, pids=(), temp_dir=temp_dir, client_port=free_port(), nodes=nodes, user=user
        )
        self._start_nodes(range(len(nodes)))
        return self.address

    def _token(self) -> str:
        self._state_dir.mkdir(parents=True, exist_ok=True)
        if not self.token_path.exists():
            with private_file(self.token_path) as token:
                token.write(secrets.token_hex(32).encode())
        return self.token_path.read_text().strip()

    def _heal(self) -> bool:
        nodes = self._note.nodes
        dead = [node.number for node in nodes if not node.runs(RAYLET)]
        has_workers = not set(range(1, len(nodes))) <= set(dead) or (len(nodes) > 1 and self._is_joined_by_others())
        revived = [number for number in dead if number == HEAD or not has_workers]
        is_headless = not nodes[HEAD].runs(GCS)
        if not revived and not is_headless:
            return self._start_due_nodes()
        _log.warning("embedded_cluster.healed", extra={"nodes": revived, "is_headless": is_headless})
        if is_headless and HEAD not in revived:
            self._start_gcs()
        self._start_nodes(revived)
        return True

    def _start_due_nodes(self) -> bool:
        """Starts the dead nodes of a cluster whose head runs, each once its pause is over."""
        now, due = self._monotonic(), []
        for node in self._note.nodes[1:]:
            life = self._lives[node.number] = seen(self._lives.get(node.number, NodeLife()), node.runs(RAYLET), now)
            at = starts_at(life)
            if at is not None and now >= at and not self._leave_dead_nodes:
                due.append(node.number)
        if not due:
            return False
        _log.warning("embedded_cluster.nodes_restarted", extra={"nodes": [self._note.nodes[n].ip for n in due]})
        self._start_together(due, timeout_s=_RESTART_TIMEOUT_S)
        now = self._monotonic()
        for number in due:
            self._lives[number] = started(self._lives[number], now)
        return True

    def _is_joined_by_others(self) -> bool:
        """Return whether nodes that are not in the note belong to this cluster, which can then train without those of
        the note."""
        return bool(set(raylets_of(self.address)) - set(self._note.nodes[HEAD].pids_of(RAYLET)))

    def _stop(self) -> None:
        note = EmbeddedNote.read(self._note_path)
        if note is None:
            return
        for leader in reversed(note.pids):
            if _is_ray(leader):
                end_session(leader)
        shutil.rmtree(note.temp_dir, ignore_errors=True)
        self._note_path.unlink(missing_ok=True)

    def _check_away(self) -> None:
        """Update `away`; log it when it changes."""
        away = tuple(node.ip for node in self._note.nodes if not node.runs(RAYLET))
        if away and away != self._away and not self._is_stopped:
            _log.warning("embedded_cluster.nodes_away", extra={"nodes": list(away), "of": len(self._note.nodes)})
        self._away = away

    def _start_nodes(self, numbers: Iterable[int]) -> None:
        """Starts the head first, then all others at the same time. A node that runs is left alone."""
        pending = [number for number in numbers if not self._note.nodes[number].runs(RAYLET)]
        if HEAD in pending:
            self._start_together([HEAD])
            self._check_up([HEAD])
            gcs = next(self._note.nodes[HEAD].pids_of(GCS))
            self._note = self._note.model_copy(update={"gcs_command": command_of(gcs)})
            self._write_note()
            pending.remove(HEAD)
        desired = list(pending)
        for attempt in range(1, _MAX_STARTS + 1):
            self._start_together(pending)
            pending = [number for number in desired if not self._note.nodes[number].runs(RAYLET)]
            if not pending or self._is_stopped:
                break
            nodes = [self._note.nodes[number].ip for number in pending]
            _log.warning("embedded_cluster.start_failed", extra={"nodes": nodes, "try": attempt, "of": _MAX_STARTS})
        if desired:
            self._check_up(desired)

    def _start_together(self, numbers: list[int], timeout_s: float = _START_TIMEOUT_S) -> None:
        """Waits until each node has come up or failed. `ray start` succeeds once its node is registered with the head.
        After the death of a raylet it would wait for 30 s, so it is not waited for."""
        launched = {number: self._launch(number) for number in numbers}
        starting = dict(launched)
        deadline = time.monotonic() + timeout_s
        while starting and not self._is_stopped and time.monotonic() < deadline:
            for number, process in list(starting.items()):
                node, status = self._note.nodes[number], process.poll()
                if status == 0 and node.runs(RAYLET):
                    self._note = self._note.with_node(node.model_copy(update={"has_been_up": True}))
                    self._say_up(number)
                if status is not None or node.has_lost(RAYLET):
                    del starting[number]
            time.sleep(_CHECK_S)  # a process of a process cannot be waited for
        self._write_note()
        for number, process in launched.items():
            if not self._note.nodes[number].has_been_up:
                self._end_sessions(self._note.nodes[number])
            process.wait()

    def _say_up(self, number: int) -> None:
        """Says for people that a node is up. The head of several nodes trains nothing, so it is not counted among the
        nodes that the user asked for."""
        others = self._note.nodes[1:]
        if number == HEAD:
            self._say("Ray: the head is up")
        else:
            self._say(f"Ray: node {number} is up, {sum(node.has_been_up for node in others)} of {len(others)}")

    def _launch(self, number: int) -> subprocess.Popen[bytes]:
        """Runs one `ray start`, which leads a session of its own."""
        node = self._note.nodes[number].model_copy(update={"has_been_up": False})
        self._note = self._note.with_node(node)
        self._end_sessions(node)  # what may remain of its last start
        cpus, gpus = (0, 0) if number == HEAD and self._num_nodes > 1 else (self._num_cpus, self._num_gpus)
        command = start_command(self._note, node, num_cpus=cpus, num_gpus=gpus)
        return self._spawn(number, command, start_environment(self._note, node), self._log_path(number))

    def _check_up(self, numbers: list[int]) -> None:
        """Checks that one of them runs. Raises EmbeddedClusterFailed if none does."""
        if self._is_stopped:
            raise EmbeddedClusterFailed("stopped before it was up")
        if not any(self._note.nodes[number].runs(RAYLET) for number in numbers):
            path = self._log_path(numbers[0])
            tail = path.read_text(errors="replace")[-2000:]
            raise EmbeddedClusterFailed(f"`ray start` did not come up; {path} ends with:\n{tail}")

    def _start_gcs(self) -> None:
        command = list(self._note.gcs_command)
        self._spawn(HEAD, command, gcs_environment(self._note), self._state_dir / "ray-gcs.log")
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not listens(self.address):
            if time.monotonic() > deadline:
                raise EmbeddedClusterFailed(f"the GCS does not listen at {self.address}")
            time.sleep(0.05)  # another process's socket cannot be waited for

    def _spawn(
        self, number: int, command: list[str], environment: dict[str, str], log_path: Path
    ) -> subprocess.Popen[bytes]:
        account = self._account
        kept = inherited(os.environ)
        with private_file(log_path) as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**(account.adapted(kept) if account else kept), **self.environment, **environment},
                **(account.popen if account else {}),
            )
        node = self._note.nodes[number]
        sessions = (*(session for session in node.sessions if pids_of_session(session)), process.pid)
        self._note = self._note.with_node(node.model_copy(update={"sessions": sessions}))
        # now, since the next control plane must know every session, also if this one is killed during a start
        self._write_note()
        return process

    def _end_sessions(self, node: EmbeddedNode) -> None:
        for leader in node.sessions:
            end_session(leader)

    def _log_path(self, number: int) -> Path:
        return self._state_dir / f"ray-node-{number}.log"

    def _write_note(self) -> None:
        self._note.write(self._note_path)


def _is_ray(leader: int) -> bool:
    """Return whether the session is still one of Ray. Another program may have reused its number since the note was
    written."""
    return any("ray" in part for pid in pids_of_session(leader) for part in command_of(pid)[:3])
