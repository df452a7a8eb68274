"""The runner's end of the link to the guardian: starts it, sends orders, reads what it reports.

The guardian is forked from the node's fork server, which has imported torch already; without one (workers with GPUs,
programs without Ray) it is a new interpreter, which imports torch once for all generations. Hidden here: the link,
which is also the guardian's sign that this worker lives, and what happens if the guardian itself is killed. Training
thread only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from shoal_workers.forkserver.launch import FORK_SERVER, fork_from
from shoal_workers.script.program import Task

_PROGRAM = Path(__file__).with_name("guardian.py")
_END_S = 10.0


class GuardianLost(ChildProcessError):
    """The guardian has ended, and with it the script's process."""


class GuardianClient:
    """One guardian. Starts it; `close` ends it, with all that is below it.

    Args:
        door: module that it imports for every script, besides what it imports anyway; empty: none.
    """

    def __init__(self, door: str = "") -> None:
        self.link, other = Pipe()
        self.pid_of_script = 0
        """0: it is not known yet, or no script runs."""
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [str(_PROGRAM), *([f"--door={door}"] if door else [])]
        with other:
            self.pid = self._start(other)
        self._pidfd = os.pidfd_open(self.pid)

    @property
    def is_alive(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def wait_until_ready(self) -> None:
        """Raises GuardianLost."""
        while "ready" not in self.next_message():
            pass

    def run(self, task: Task) -> None:
        """Raises GuardianLost."""
        self._send({"run": asdict(task)})

    def stop(self, grace_s: float) -> None:
        """SIGTERM to the script, and SIGKILL after that time. Raises GuardianLost."""
        self._send({"stop": grace_s})

    def next_message(self) -> dict[str, Any]:
        """What the guardian has sent; blocks if it is nothing. Raises GuardianLost."""
        try:
            message: dict[str, Any] = json.loads(self.link.recv_bytes())
        except (EOFError, OSError):
            raise GuardianLost(f"the guardian of the script (process {self.pid}) has ended unexpectedly") from None
        self.pid_of_script = 0 if "ended" in message else message.get("pid", self.pid_of_script)
        return message

    def kill(self) -> None:
        """The script's process dies with the guardian; what it has started is left to who adopts it."""
        if self.pid_of_script:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid_of_script, signal.SIGKILL)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Return when nothing of it is left, or after 10 s. Idempotent."""
        if self._pidfd < 0:
            return
        self.link.close()
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(_END_S * 1000):
            self.kill()
        if self._process is not None:
            self._process.wait()
        os.close(self._pidfd)
        self._pidfd = -1

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.link.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise GuardianLost(f"the guardian of the script (process {self.pid}) does not answer: {error}") from None

    def _start(self, link: Connection) -> int:
        server = os.environ.get(FORK_SERVER)
        if server:
            with suppress(OSError):
                return fork_from(server, self._command, (link.fileno(), 1, 2))
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # no threads of libraries in a process that forks
        self._process = subprocess.Popen([sys.executable, *self._command], stdin=link.fileno(), env=environment)
        return self._process.pid
