"""Ray clusters of their own on this machine, and the `shoal join` process of each.

    RayCluster    a head on a port of its own, with its raylet; `lose` kills all of it
    Join          `shoal join`: the gateway of one cluster

Each runs from the interpreter that it is given, as on machines on which Shoal is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.processes.os_processes import end_session, session_members
from kit.processes.server import PATIENCE_S, until

MAIN = "from shoal_api.cli.entry import main; main()"
_START = """
import sys
from pathlib import Path
from shoal_service.cluster.embedded_cluster import EmbeddedCluster
EmbeddedCluster(Path(sys.argv[1]), num_cpus=int(sys.argv[2])).start()
"""


def clean_environment() -> dict[str, str]:
    """Without what would tell a process of Shoal or Ray how it is set up."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SHOAL_", "PYTHON"))}


@dataclass
class RayCluster:
    """One node, which is the head and has the CPUs. Each start after a loss makes another Ray cluster."""

    python: Path
    directory: Path
    num_cpus: int

    def start(self) -> None:
        """Returns when it is up. One that runs is left as it is."""
        self.directory.mkdir(parents=True, exist_ok=True)
        started = subprocess.run(
            [self.python, "-c", _START, str(self.directory), str(self.num_cpus)],
            env={**clean_environment(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        assert started.returncode == 0, started.stderr

    @property
    def note(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "embedded-cluster.json").read_text())
        return found

    @property
    def address(self) -> str:
        return str(self.note["address"])

    @property
    def access(self) -> dict[str, str]:
        """What a driver's environment must contain."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.directory / "ray-token"),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes the host's own address for 127.0.0.1
        }

    @property
    def is_alive(self) -> bool:
        return any("/raylet/raylet " in f"{command} " for command in self.processes().values())

    def processes(self) -> dict[int, str]:
        """By pid: the command lines of all of its processes."""
        if not (self.directory / "embedded-cluster.json").exists():
            return {}
        return {pid: command for session in self.note["pids"] for pid, command in session_members(session).items()}

    def actors(self, kind: str) -> list[int]:
        """Pids of the actors of a class."""
        return [pid for pid, command in self.processes().items() if command.startswith(f"ray::{kind}")]

    def lose(self) -> None:
        """SIGKILL to head, raylet, workers and supervisors."""
        for session in self.note["pids"]:
            end_session(session)

    def end(self) -> None:
        if (self.directory / "embedded-cluster.json").exists():
            self.lose()
            shutil.rmtree(self.note["temp_dir"], ignore_errors=True)


@dataclass
class Join:
    """A `shoal join` process."""

    python: Path
    directory: Path
    options: list[str] = field(default_factory=list)
    """The URL, and what follows it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    _num_starts: int = 0

    def start(self) -> Join:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._num_starts += 1
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [self.python, "-c", MAIN, "join", *self.options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.directory,
                env={**clean_environment(), **self.environment},
            )
        return self

    @property
    def _log(self) -> Path:
        return self.directory / f"join-{self._num_starts}.log"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def output(self) -> str:
        """What the newest gateway process has printed."""
        return self._log.read_text(errors="replace")

    def wait_to_say(self, text: str) -> str:
        """Its output, once this is in it."""
        until(lambda: text in self.output() or not self.is_alive, f"`shoal join` says {text!r}")
        found = self.output()
        assert text in found, found
        return found

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        assert self.process is not None
        return self.process.wait(timeout=PATIENCE_S)

    def end(self) -> None:
        if self.process is not None:
            end_session(self.process.pid)
            self.process.wait(timeout=PATIENCE_S)
