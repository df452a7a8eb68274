"""A real `shoal serve` in a process of its own, with an embedded Ray cluster or joined to one."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.guard.guard import Guard
from shoal_api.client import Client
from shoal_service.core.access import ADMIN_TOKEN_FILE

NUM_CPUS = 8
"""CPUs of the session's cluster."""
PATIENCE_S = 120.0
"""Far more than any operation takes, so that a busy machine does not fail a test."""
_POLL_S, _LONGEST_POLL_S = 0.02, 0.1
SECRET = "not-for-job-code"
SERVICE_SECRETS = {
    "SHOAL_MAX_PROBATION": "20%",
    "SHOAL_WEBHOOK_SECRET_TEST": SECRET,
    "SHOAL_WEBHOOK_RECEIVERS": "127.0.0.1",
    "SHOAL_WEBHOOK_PROJECT_SECRETS": '{"*": ["*"]}',
    "PGPASSWORD": SECRET,
    "BACKUP_TARGET": f"postgresql://shoal:{SECRET}@database/shoal",
}
"""In the environment of the session's server."""
_MARK = "SHOALTEST_GUARD"
_MAIN = "from shoal_api.cli.entry import main; main()"
_LIST_LEFT = """
import json, sys, ray
from ray.experimental import internal_kv
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
journal = internal_kv._internal_kv_list(b"", namespace=b"shoal-journal")
groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
actors = [one for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"].startswith("shoal")]
print(json.dumps([actors, groups, [key.decode() for key in journal]]))
"""


def until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Poll another process or the file system, which cannot notify this one. A condition that takes longer, such as a
    request, is evaluated less often: for a ninth of the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        begin = time.monotonic()
        if found := condition():
            return found
        assert begin < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(min(max(_POLL_S, 8 * (time.monotonic() - begin)), _LONGEST_POLL_S))


@dataclass
class Server:
    """A `shoal serve` process. `stop` ends it in order; `kill` leaves the embedded cluster running."""

    python: Path
    state_dir: Path
    options: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    log_path: Path | None = None
    """Output of the newest process."""
    sessions: set[int] = field(default_factory=set)
    """The sessions of this server and of its clusters: each of its processes is in one of them."""
    mark: str = field(default_factory=lambda: f"guarded-{secrets.token_hex(8)}")
    guard: Guard | None = None
    """Ends them if this process does not."""

    def start(self) -> Server:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        if self.guard is None:
            self.guard = Guard(f"{_MARK}={self.mark}", self.state_dir)
        log_path = self.log_path = self.state_dir / f"server-{len(self.sessions)}.log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SHOAL_", "PYTHON"))}
        options = [f"--port={self.port}", f"--state-dir={self.state_dir}", *self.options]
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [self.python, "-c", _MAIN, "serve", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.state_dir,
                env={**inherited, "OMP_NUM_THREADS": "1", _MARK: self.mark, **self.environment},
            )
        self.sessions.add(self.process.pid)

        def listening() -> str | None:
            assert self.process is not None and self.process.poll() is None, log_path.read_text()
            lines = [line for line in log_path.read_text().splitlines() if line.startswith("listening on ")]
            return lines[0].rpartition(":")[2] if lines else None

        self.port = int(until(listening, "the server listens"))
        return self

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", token=self.token)

    @property
    def token_file(self) -> Path:
        """The token of the server's owner."""
        return self.state_dir / ADMIN_TOKEN_FILE

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    def wait_for_cluster(self) -> None:
        with self.client as client:
            until(lambda: client.cluster().connected and client.cluster().cpus_total, "the cluster is up")
        self._learn_sessions()

    def wait_until_free(self) -> None:
        """Return when all CPUs of the cluster are free and no worker is left."""
        with self.client as client:
            until(lambda: client.cluster().cpus_free == NUM_CPUS, "all CPUs are free")
        until(lambda: not self.actors("WorkerActor"), "all workers are gone")

    def _learn_sessions(self) -> None:
        if self.note is not None:
            self.sessions.update(self.note["pids"])

    @property
    def note(self) -> dict[str, Any] | None:
        """The note that the server wrote about its embedded cluster."""
        path = self.state_dir / "embedded-cluster.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def ray_environment(self) -> dict[str, str]:
        """Environment of a driver of the embedded cluster."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.state_dir / "ray-token"),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes the host's own address for 127.0.0.1
        }

    def kill(self) -> float:
        """Send SIGKILL; returns the time. The embedded cluster keeps running."""
        assert self.process is not None
        self._learn_sessions()
        at = time.time()
        self.process.kill()
        self.process.wait()
        return at

    def stop(self) -> int:
        """Stop in order; returns the exit status."""
        self.send(signal.SIGTERM)
        return self.wait()

    def send(self, number: signal.Signals) -> None:
        """A signal to the server, not to its cluster."""
        assert self.process is not None
        self._learn_sessions()
        self.process.send_signal(number)

    def wait(self) -> int:
        """Return when the server has ended; its exit status."""
        assert self.process is not None
        return self.process.wait(timeout=PATIENCE_S)

    def output(self) -> str:
        """What the newest process has printed so far."""
        assert self.log_path is not None
        return self.log_path.read_text()

    def processes(self) -> dict[int, str]:
        """Every process that this server or its cluster started, by pid: its command line."""
        found = {}
        for directory in Path("/proc").iterdir():
            try:
                if not directory.name.isdigit() or os.getsid(int(directory.name)) not in self.sessions:
                    continue
                if (directory / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue  # dead; its parent has not reaped it yet
                command = (directory / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[int(directory.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def actors(self, kind: str) -> list[int]:
        """Pids of the actors of a class."""
        return [pid for pid, command in self.processes().items() if command.startswith(f"ray::{kind}")]

    def gateway(self) -> int:
        """The pid of its gateway, once one runs."""

        def pid() -> int:
            return next((pid for pid, command in self.processes().items() if "gateway.process" in command), 0)

        return int(until(pid, "the gateway runs"))

    def whats_left(self) -> tuple[Any, ...]:
        """Shoal's named actors, placement groups and journal entries of the cluster. Ray Data leaves actors of its
        own, which live as long as the cluster."""
        assert self.note is not None
        left = subprocess.run(
            [self.python, "-c", _LIST_LEFT, self.note["address"]],
            env={**os.environ, **self.ray_environment},
            check=True,
            capture_output=True,
            text=True,
        )
        return tuple(json.loads(left.stdout.splitlines()[-1]))

    @contextmanager
    def running(self) -> Iterator[Client]:
        """With its cluster, and a client of it; stopped in order at the end."""
        try:
            self.start().wait_for_cluster()
            with self.client as client:
                yield client
            assert self.stop() == 0
        finally:
            self.end()

    def end(self) -> None:
        """Kill what still runs, and remove the files of the cluster."""
        note = self.note
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.sweep()
        if note is not None:
            shutil.rmtree(note["temp_dir"], ignore_errors=True)

    def sweep(self) -> dict[int, str]:
        """Send SIGKILL to every process that is left; returns pid -> command line."""
        left = self.processes()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.guard is not None:
            self.guard.sweep()
            self.guard = None
        return left


def assert_nothing_is_left(server: Server) -> None:
    """After all jobs have ended, neither the cluster nor the storage contains anything unfinished."""
    with server.client as client:
        assert all(job.state.ended for job in client.jobs())
    server.wait_until_free()
    until(lambda: not server.actors("SupervisorActor"), "all supervisors are gone")
    if any(left := server.whats_left()):  # Ray removes what it was told to remove a little later
        until(lambda: not any(server.whats_left()), f"nothing is left of {left}")
    names = [path.name for path in (server.state_dir / "checkpoints").rglob("*")]
    assert [name for name in names if name.endswith(".writing") or name.startswith("write-probe")] == []
