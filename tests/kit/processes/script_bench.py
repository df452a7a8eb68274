"""Scripts on real runners in this process: no Ray, one thread for each rank, real guardians and script processes.

A script says what it does with `events.say(...)`, so a test waits for an event and never for a time. The module is in
the folder of the script:

    import events
    events.say(rank=0, saved=True)        one message to the test, at once
    events.wait()                         until the process is killed
"""

import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import Assignment, LogLine, WorkerExit
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import WorkerReport
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.script.runner import ScriptRunner

PATIENCE_S = 120.0
"""Far more than anything takes, so that a busy machine does not fail a test."""
SCRIPTS = Path(__file__).parents[1] / "scripts"
_EVENTS = """
import json, os, socket, threading
_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
_socket.connect("\\0" + os.environ["SHOALTEST_EVENTS"])

def say(**facts):
    _socket.send(json.dumps({"pid": os.getpid(), **facts}).encode())

def wait():
    threading.Event().wait()
"""


class Events:
    """What the processes of scripts say, in the order of arrival."""

    def __init__(self) -> None:
        self.address = f"shoal-test-{secrets.token_hex(8)}"
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def next(self, **facts: Any) -> dict[str, Any]:
        """The next event that has these facts; others before it are dropped."""
        while True:
            event = self._queue.get(timeout=PATIENCE_S)
            if facts.items() <= event.items():
                return event

    def settle(self) -> None:
        """Returns when every script that has said something has ended."""
        for thread in self._threads[1:]:
            thread.join(PATIENCE_S)

    def close(self) -> None:
        """Once no script is left."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._read, args=(connection,)))
            self._threads[-1].start()

    def _read(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(1 << 16):
                self._queue.put(json.loads(data))


class ScriptBench:
    """Runners of one script. The current directory is its folder.

    Args:
        changes: keys of the spec besides `script`.
    """

    def __init__(
        self, folder: Path, script: dict[str, Any], num_workers: int, nodes: Sequence[str] = (), **changes: Any
    ) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.generation = 0
        spec = JobSpec.model_validate({"script": script, **changes})
        self.outboxes = [Outbox(f"w{number}") for number in range(num_workers)]
        self.runners = [
            ScriptRunner(
                spec,
                checkpoint_root=str(self.checkpoints),
                outbox=outbox,
                store=StoreServer("127.0.0.1", "key"),
                node_id=nodes[number] if nodes else "node",
            )
            for number, outbox in enumerate(self.outboxes)
        ]
        self._threads: list[threading.Thread] = []
        self._exits: dict[int, WorkerExit] = {}
        self._errors: list[BaseException] = []

    def prepare(self) -> None:
        for runner in self.runners:
            runner.prepare()

    def start(self, world_size: int | None = None, **changes: Any) -> int:
        """Begin the next generation on the first `world_size` runners; returns its number."""
        self.generation += 1
        size = world_size or len(self.runners)
        self._exits, self._errors = {}, []
        self._threads = [
            threading.Thread(target=self._run, args=(rank, self.assignment(rank, size, **changes)))
            for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()
        return self.generation

    def start_alone(self, world_size: int, **changes: Any) -> None:
        """Begin the next generation on rank 0 only."""
        self.generation += 1
        self._exits, self._errors = {}, []
        self._threads = [threading.Thread(target=self._run, args=(0, self.assignment(0, world_size, **changes)))]
        self._threads[0].start()

    def assignment(self, rank: int, world_size: int, **changes: Any) -> Assignment:
        values: dict[str, Any] = {
            "job_id": "job",
            "attempt": 1,
            "generation": self.generation,
            "rank": rank,
            "layout": Layout(dp_replicate=world_size),
            "store_host": "127.0.0.1",
            "store_port": self.runners[0].store_port,
            "restore_from": None,
        }
        return Assignment(**{**values, **changes})

    def exits(self) -> list[WorkerExit]:
        """By rank, when all have left the generation."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert self._errors == []
        assert len(self._exits) == len(self._threads), "a runner has not left"
        return [self._exits[rank] for rank in sorted(self._exits)]

    def exit_of(self, rank: int) -> WorkerExit:
        self._threads[rank].join(PATIENCE_S)
        assert self._errors == []
        return self._exits[rank]

    def run(self, world_size: int | None = None) -> list[WorkerExit]:
        self.start(world_size)
        return self.exits()

    def interrupt(self) -> list[WorkerExit]:
        self.on_all(lambda runner: runner.interrupt(self.generation))
        return self.exits()

    def request_yield(self) -> list[WorkerExit]:
        self.on_all(lambda runner: runner.request_yield(self.generation))
        return self.exits()

    def on_all(self, call: Callable[[ScriptRunner], object]) -> None:
        for runner in self.runners:
            call(runner)

    def reports(self, kind: type[Any], rank: int = 0) -> list[Any]:
        return [one for one in self._poll(rank)[0] if isinstance(one, kind)]

    def said(self, rank: int = 0) -> list[str]:
        """The lines of the job's log that the runner itself has written."""
        return [line.text for line in self._poll(rank)[1]]

    def close(self) -> None:
        self.on_all(lambda runner: runner.interrupt(self.generation))
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self.on_all(lambda runner: runner.close())

    def _poll(self, rank: int) -> tuple[tuple[WorkerReport, ...], tuple[LogLine, ...]]:
        poll = self.outboxes[rank].poll(0, 0.0, self.runners[rank].progress)
        return poll.reports, poll.logs

    def _run(self, rank: int, assignment: Assignment) -> None:
        try:
            self._exits[rank] = self.runners[rank].run(assignment)
        except BaseException as error:
            self._errors.append(error)


def write_script(folder: Path, text: str, name: str = "train.py") -> None:
    """A script, and the module `events` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    (folder / "events.py").write_text(_EVENTS, encoding="utf-8")


class ForkServer:
    """A node's fork server without a raylet. It ends with a shell that plays the raylet."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "raylet.shoal-test")
        start = f"from shoal_workers.forkserver.launch import start_server; start_server({self.address!r})"
        self._shell = subprocess.Popen(["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.write(f'{sys.executable} -c "{start}"; echo started\n')
        self._shell.stdin.flush()
        assert self._shell.stdout.readline() == "started\n"

    def close(self) -> None:
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.close()
        self._shell.wait(PATIENCE_S)
        self._shell.stdout.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
