"""Starts the local Ray cluster of `shoal serve`, and keeps it alive.

Its processes lead sessions, so they outlive a control plane that is killed. The next control plane finds them by the
note in the state directory. A control plane that stops in an orderly way ends these sessions.

    one node        the head is also the node of the workers: `ray start --head` with all CPUs
    several nodes   a head without CPUs, and one raylet per node at 127.0.0.2, 127.0.0.3, ...

`start` returns when every node is registered and its raylet runs. A node that does not come up is started again, up to
three times. A node that fails three times is in the log and in `dead_nodes`, and the cluster goes on without it.

With an `account` all of them run as another user than this process (isolation.py).

`heal` starts the head again when it has died. Its tables (GCS) are on disk: actors live on without it, and the
new head finds them. If only its GCS process has died, only that process is started again. Another dead node is started
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

from shoal_service.cluster.connects import find_free_port, listens
from shoal_service.cluster.embedded_node import (
    GCS,
    HEAD,
    RAYLET,
    EmbeddedClusterFailed,
    EmbeddedNode,
    EmbeddedNote,
    end_session,
    find_raylets,
    find_session_pids,
    make_gcs_environment,
    make_start_command,
    make_start_environment,
    open_private_file,
    read_command,
)
from shoal_service.cluster.isolation import Account
from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT, inherit_environment
from shoal_service.core.node_restarts import NodeHistory

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 120.0
_MAX_STARTS = 3
"""Starts of one node before the cluster goes on without it."""
_RESTART_TIMEOUT_S = 30.0
"""Limit for the restart of nodes beside a running head. Meanwhile `heal` cannot check the head."""
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
            leave_dead_nodes: for experiments, in which a dead node stays dead, like a machine.
            account: the user that runs Ray, who cannot read `state_dir`; without it, the user of this process.
            say: prints one line for people; called when a node has come up.
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
        self._histories: dict[int, NodeHistory] = {}
        """By number of the node; the head has none."""
        self.address = ""
        self._note = EmbeddedNote(address="", pids=(), temp_dir="")
        self._lock = threading.Lock()
        self._is_stopped = False
        """A start that is under way reads it without the lock, and ends."""
        self.dead_nodes: tuple[str, ...] = ()
        """Addresses of the nodes without a live raylet, at the end of the last `start` or `heal`. Read only, from any
        thread."""
        self.adopted = False
        """True if the cluster was already running."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a driver must have before it imports ray, which reads them once.

        They set token authentication, and loopback: Ray otherwise replaces 127.0.0.1 by another address of the host.
        Another user cannot read the token's file, so its processes get the token itself.
        """
        token = {"RAY_AUTH_TOKEN_PATH": str(self.token_path)}
        if self._account is not None:
            token = {"RAY_AUTH_TOKEN": self._read_token()}
        return {
            "RAY_AUTH_MODE": "token",
            **token,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            **CLUSTER_ENVIRONMENT,
        }

    def start(self) -> str:
        """Adopt the running cluster of an earlier control plane, or start one. Return its address.

        Raises:
            EmbeddedClusterFailed: the head did not come up, or none of the other nodes did, or `stop` was called.
        """
        with self._lock:
            self._is_stopped = False
            try:
                return self._start()
            finally:
                self._update_dead_nodes()

    def heal(self) -> bool:
        """Start what has died; return whether something was started. After `stop` it does nothing.

        The head is started at once, and so are all nodes if none runs. Otherwise a dead node waits for its pause.
        Call it after `start`.
        """
        with self._lock:
            if self._is_stopped:
                return False
            try:
                return self._heal()
            finally:
                self._update_dead_nodes()

    def stop(self) -> None:
        """Kill all processes of the note's sessions, and remove their temporary files.

        There is nothing to save, and Ray takes ten seconds and more after a SIGTERM.
        """
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
        self._read_token()
        self.address = f"127.0.0.1:{find_free_port()}"
        # A short path, because Ray puts Unix sockets below it. It is 0700; Ray opens its own directories to everybody.
        temp_dir = tempfile.mkdtemp(prefix="shoal-ray-")
        if self._account is not None:
            os.chown(temp_dir, self._account.uid, self._account.gid)
            Path(temp_dir).chmod(0o750)  # the gateway is in this group
        nodes = tuple(EmbeddedNode(number=n) for n in range(1 if self._num_nodes == 1 else self._num_nodes + 1))
        self._note = EmbeddedNote(
            address=self.address, pids=(), temp_dir=temp_dir, client_port=find_free_port(), nodes=nodes, user=user
        )
        self._start_nodes(range(len(nodes)))
        return self.address

    def _read_token(self) -> str:
        """Return the token of the cluster. The first call makes it."""
        self._state_dir.mkdir(parents=True, exist_ok=True)
        if not self.token_path.exists():
            with open_private_file(self.token_path) as token:
                token.write(secrets.token_hex(32).encode())
        return self.token_path.read_text().strip()

    def _heal(self) -> bool:
        nodes = self._note.nodes
        dead = [node.number for node in nodes if not node.runs(RAYLET)]
        others_run = any(node.number not in dead for node in nodes[1:]) or (len(nodes) > 1 and self._has_other_nodes())
        urgent = [number for number in dead if number == HEAD or not others_run]
        is_headless = not nodes[HEAD].runs(GCS)
        if not urgent and not is_headless:
            return self._start_due_nodes()
        _log.warning("embedded_cluster.healed", extra={"nodes": urgent, "is_headless": is_headless})
        if is_headless and HEAD not in urgent:
            self._start_gcs()
        self._start_nodes(urgent)
        return True

    def _start_due_nodes(self) -> bool:
        """Start the dead nodes whose pause is over. The head runs. Return whether there was one."""
        now, due = self._monotonic(), []
        for node in self._note.nodes[1:]:
            history = self._histories.get(node.number, NodeHistory()).record_check(node.runs(RAYLET), now)
            self._histories[node.number] = history
            start_mono = history.next_start_mono
            if start_mono is not None and now >= start_mono and not self._leave_dead_nodes:
                due.append(node.number)
        if not due:
            return False
        _log.warning("embedded_cluster.nodes_restarted", extra={"nodes": [self._note.nodes[n].ip for n in due]})
        self._start_together(due, timeout_s=_RESTART_TIMEOUT_S)
        now = self._monotonic()
        for number in due:
            self._histories[number] = self._histories[number].record_start(now)
        return True

    def _has_other_nodes(self) -> bool:
        """Return whether nodes that are not in the note have joined this cluster. It can train on these alone."""
        return bool(set(find_raylets(self.address)) - set(self._note.nodes[HEAD].find_pids(RAYLET)))

    def _stop(self) -> None:
        note = EmbeddedNote.read(self._note_path)
        if note is None:
            return
        for leader in reversed(note.pids):
            if _is_ray(leader):
                end_session(leader)
        shutil.rmtree(note.temp_dir, ignore_errors=True)
        self._note_path.unlink(missing_ok=True)

    def _update_dead_nodes(self) -> None:
        """Update `dead_nodes`; log it when it changes."""
        dead = tuple(node.ip for node in self._note.nodes if not node.runs(RAYLET))
        if dead and dead != self.dead_nodes and not self._is_stopped:
            _log.warning("embedded_cluster.nodes_away", extra={"nodes": list(dead), "of": len(self._note.nodes)})
        self.dead_nodes = dead

    def _start_nodes(self, numbers: Iterable[int]) -> None:
        """Start the head, then all others at the same time. A node that runs is left alone."""
        pending = [number for number in numbers if not self._note.nodes[number].runs(RAYLET)]
        if HEAD in pending:
            self._start_together([HEAD])
            self._require_up([HEAD])
            gcs = next(self._note.nodes[HEAD].find_pids(GCS))
            self._note = self._note.model_copy(update={"gcs_command": read_command(gcs)})
            self._note.write(self._note_path)
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
            self._require_up(desired)

    def _start_together(self, numbers: list[int], timeout_s: float = _START_TIMEOUT_S) -> None:
        """Start these nodes; return when each has come up or failed.

        `ray start` succeeds once its node is registered with the head. After the death of a raylet it goes on for 30 s,
        so the node counts as failed before.
        """
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
        self._note.write(self._note_path)
        for number, process in launched.items():
            if not self._note.nodes[number].has_been_up:
                self._end_sessions(self._note.nodes[number])
            process.wait()

    def _say_up(self, number: int) -> None:
        """Print that a node is up. A head beside other nodes trains nothing, so it is not counted."""
        others = self._note.nodes[1:]
        if number == HEAD:
            self._say("Ray: the head is up")
        else:
            self._say(f"Ray: node {number} is up, {sum(node.has_been_up for node in others)} of {len(others)}")

    def _launch(self, number: int) -> subprocess.Popen[bytes]:
        """Run one `ray start` in a new session."""
        node = self._note.nodes[number].model_copy(update={"has_been_up": False})
        self._note = self._note.with_node(node)
        self._end_sessions(node)  # what may remain of its last start
        cpus, gpus = (0, 0) if number == HEAD and self._num_nodes > 1 else (self._num_cpus, self._num_gpus)
        command = make_start_command(self._note, node, num_cpus=cpus, num_gpus=gpus)
        return self._spawn(number, command, make_start_environment(self._note, node), self._log_path(number))

    def _require_up(self, numbers: list[int]) -> None:
        """Raise EmbeddedClusterFailed if none of these nodes runs."""
        if self._is_stopped:
            raise EmbeddedClusterFailed("stopped before it was up")
        if not any(self._note.nodes[number].runs(RAYLET) for number in numbers):
            path = self._log_path(numbers[0])
            tail = path.read_text(errors="replace")[-2000:]
            raise EmbeddedClusterFailed(f"`ray start` did not come up; {path} ends with:\n{tail}")

    def _start_gcs(self) -> None:
        command = list(self._note.gcs_command)
        self._spawn(HEAD, command, make_gcs_environment(self._note), self._state_dir / "ray-gcs.log")
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not listens(self.address):
            if time.monotonic() > deadline:
                raise EmbeddedClusterFailed(f"the GCS does not listen at {self.address}")
            time.sleep(0.05)  # another process's socket cannot be waited for

    def _spawn(
        self, number: int, command: list[str], environment: dict[str, str], log_path: Path
    ) -> subprocess.Popen[bytes]:
        account = self._account
        inherited = inherit_environment(os.environ)
        with open_private_file(log_path) as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={
                    **(account.adapt_environment(inherited) if account else inherited),
                    **self.environment,
                    **environment,
                },
                **(account.popen if account else {}),
            )
        node = self._note.nodes[number]
        sessions = (*(session for session in node.sessions if find_session_pids(session)), process.pid)
        self._note = self._note.with_node(node.model_copy(update={"sessions": sessions}))
        # now, since the next control plane must know every session, also if this one is killed during a start
        self._note.write(self._note_path)
        return process

    def _end_sessions(self, node: EmbeddedNode) -> None:
        for leader in node.sessions:
            end_session(leader)

    def _log_path(self, number: int) -> Path:
        return self._state_dir / f"ray-node-{number}.log"


def _is_ray(leader: int) -> bool:
    """Return whether the session runs Ray. Another program may have reused its number since the note was written."""
    return any("ray" in part for pid in find_session_pids(leader) for part in read_command(pid)[:3])
