"""Real groups without Ray: worker processes forked from a zygote, driven over sockets as an actor drives them."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, get_args

import pytest

from kit.device import ON_GPU
from kit.processes.warm import Zygote, shared_zygote
from shoal_workers.checkpoint.commit import marker_of, newest_committed, write_marker
from shoal_workers.contract.layout import Layout, fully_sharded
from shoal_workers.contract.messages import Assignment, ExitKind, LogLine, WorkerExit, WorkerPoll
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.contract.worker_reports import GroupFormed, SavedPart, StepReport, WorkerReport

_PROGRAM = str(Path(__file__).with_name("worker_process.py"))
PATIENCE_S = 120.0
"""Far more than anything takes that a test waits for, and far less than a collective may take: what ends within it was
not ended by a timeout of gloo."""
_KINDS = ("reply", "exit", "reached", "dumped")


class RemoteWorker:
    """The test's end of the connection to one worker process."""

    def __init__(
        self,
        connection: Connection,
        pid: int,
        spec: dict[str, Any],
        root: str,
        has_exit: threading.Event,
        memory: tuple[str, str] | None = None,
        by_axis: bool | None = None,
    ) -> None:
        """`memory`: directory of the snapshots and node id; None: no snapshot store. `by_axis`: as of `Engine`. Without
        a spec it has no engine, and only `call("call", ...)` works."""
        self.pid = pid
        self.reports: list[WorkerReport] = []
        self.logs: list[LogLine] = []
        self._seq = 0
        self._connection = connection
        self._inbox: dict[str, queue.Queue[Any]] = {kind: queue.Queue() for kind in _KINDS}
        self._calling = threading.Lock()
        self.gone = threading.Event()
        """The process is dead."""
        self.has_exit = has_exit
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._receiver.start()
        self.node_id = memory[1] if memory else ""
        self.store_port = self.snapshot_port = 0
        if spec:
            self.store_port, self.snapshot_port = self.call("create", spec, root, memory, by_axis)

    @property
    def snapshot_server(self) -> SnapshotServer:
        return SnapshotServer(node_id=self.node_id, host="127.0.0.1", port=self.snapshot_port)

    def call(self, name: str, *arguments: Any) -> Any:
        with self._calling:
            self._connection.send((name, arguments))
            return self._inbox["reply"].get(timeout=PATIENCE_S)

    def strike(self, phase: str, step: int, action: str, *, count: int = 1) -> None:
        """`action`: kill, stop, hold, dump, flip (a bit of a parameter), "flip in NAME" or "flip to inf", as `phase` is
        entered the `count`-th time after `step` steps; or "kill within" the update that follows."""
        self.call("strike", phase, step, action, count)

    def died(self) -> bool:
        """Wait for its death; False: it is alive after PATIENCE_S."""
        return self.gone.wait(PATIENCE_S)

    def reached(self) -> Any:
        return self._inbox["reached"].get(timeout=PATIENCE_S)

    def dumped(self) -> Any:
        """The worker's part of the state at a strike with `dump`."""
        return self._inbox["dumped"].get(timeout=PATIENCE_S)

    def exit(self, timeout_s: float = PATIENCE_S) -> WorkerExit:
        answer = self._inbox["exit"].get(timeout=timeout_s)
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, WorkerExit)
        return answer

    def exit_so_far(self) -> WorkerExit | None:
        """As `exit`, without waiting; None: it has not left."""
        try:
            return self.exit(timeout_s=0.001)
        except queue.Empty:
            return None

    def poll(self) -> list[WorkerReport]:
        """All reports so far."""
        self._poll()
        return self.reports

    def new_logs(self) -> tuple[LogLine, ...]:
        """The reports since the last call."""
        return self._poll()

    def _poll(self) -> tuple[LogLine, ...]:
        answer: WorkerPoll = self.call("poll", self._seq)
        self._seq = answer.seq
        self.reports.extend(answer.reports)
        self.logs.extend(answer.logs)
        return answer.logs

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if self.gone.is_set():  # it was reaped, so another process may have its number
            return
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            pass

    def _receive(self) -> None:
        try:
            while True:
                kind, value = self._connection.recv()
                self._inbox[kind].put(value)
                if kind == "exit":
                    self.has_exit.set()
        except (EOFError, OSError):
            self.gone.set()

    def close(self) -> None:
        """Close the connection once nothing reads it: the next one may have the same descriptor, and this one's thread
        would read what comes there."""
        with socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_RDWR)
        self._receiver.join()
        self._connection.close()


class Job:
    """Plays the supervisor for the workers of one job."""

    def __init__(
        self,
        fleet: Fleet,
        spec: dict[str, Any],
        root: Path,
        memory_root: Path | None,
        by_axis: bool | None = None,
    ) -> None:
        self._fleet = fleet
        self._by_axis = by_axis
        self._memory_root = memory_root
        self.spec = {"task": "tiny_tasks:Counting", **spec}
        self.spec = {key: value for key, value in self.spec.items() if value is not None}
        if ON_GPU:
            self.spec["worker"] = {"gpus": 1, **self.spec.get("worker", {})}
        self.root = str(root)
        self.generation = 0
        self.committed: list[str] = []

    def workers(self, count: int, node_id: str = "n1") -> list[RemoteWorker]:
        memory = (str(self._memory_root), node_id) if self._memory_root else None
        return [self._fleet.start(self.spec, self.root, memory, self._by_axis) for _ in range(count)]

    def lose_one_of_two(self, phase: str, step: int, **changes: Any) -> tuple[RemoteWorker, SnapshotSource]:
        """Kills one of two workers while both are held in this phase after `step` steps. Returns the other one, and
        what it goes on from."""
        survivor, victim = self.workers(2)
        for worker in (survivor, victim):
            worker.strike(phase, step, "hold")
        self.start([survivor, victim], **changes)
        for worker in (survivor, victim):
            worker.reached()
        victim.kill()
        assert victim.died()
        survivor.call("go")
        return survivor, self.in_memory(self.interrupt([survivor]), [survivor])

    def lose_a_node(self, step: int) -> tuple[RemoteWorker, SnapshotSource]:
        """Does the same to one of two workers that are each other's buddies on two nodes, in the forward pass."""
        here, there = self.workers(1, "n1")[0], self.workers(1, "n2")[0]
        for worker in (here, there):
            worker.strike("forward", step, "hold")
        generation = self.start([here, there], buddy_of=lambda rank: [there, here][rank])
        for worker in (here, there):
            worker.reached()
        there.kill()
        assert there.died()
        here.call("interrupt", generation)
        here.call("go")
        return here, self.in_memory(self.interrupt([here]), [here])

    def lose_one_of_three(self, step: int) -> tuple[list[RemoteWorker], SnapshotSource]:
        """Kills the last of three workers, each on a node of its own and sharded, in the forward pass after `step`
        steps. Returns all three, and what the first two go on from: the last step may still be on its way to them."""
        group = [worker for node in range(3) for worker in self.workers(1, f"n{node}")]
        survivors, victim = group[:2], group[2]
        for worker in survivors:  # the victim may be in the next step before they have ended this one
            worker.strike("forward", step, "report")
        victim.strike("forward", step, "hold")
        self.start(group, layout=Layout(dp_shard=3), restore_from=None, buddy_of=lambda rank: group[(rank + 1) % 3])
        for worker in group:
            worker.reached()
        victim.poll()
        victim.kill()
        source = self.in_memory(self.interrupt(survivors), survivors)
        assert step - 1 <= source.step <= step
        return group, source

    def lose(self, workers: list[RemoteWorker], victim: RemoteWorker, phase: str, step: int, **changes: Any) -> Any:
        """Kill one of a group in this phase after `step` steps, once all others have ended these steps too: a rank that
        needs no other to go on may be ahead of them. Returns what the others go on from."""
        survivors = [worker for worker in workers if worker is not victim]
        victim.strike(phase, step, "hold")
        for worker in survivors:
            worker.strike("forward", step, "report")
        self.start(workers, **changes)
        for worker in workers:
            worker.reached()
        victim.kill()
        assert victim.died()
        source = self.in_memory(self.interrupt(survivors), survivors)
        assert source.step == step
        return source

    @staticmethod
    def in_memory(exits: list[WorkerExit], survivors: list[RemoteWorker]) -> SnapshotSource:
        """The newest snapshot that is complete on nodes with a live worker."""
        servers = {worker.node_id: worker.snapshot_server for worker in survivors}
        held: dict[tuple[int, int, int], dict[int, SnapshotServer]] = {}
        for holding in (holding for worker_exit in exits for holding in worker_exit.snapshot_parts):
            if holding.node_id in servers:
                key = holding.step, holding.generation, holding.world_size
                held.setdefault(key, {})[holding.rank] = servers[holding.node_id]
        step, generation, world_size = max(key for key, parts in held.items() if len(parts) == key[2])
        parts = held[step, generation, world_size]
        return SnapshotSource(
            generation=generation, world_size=world_size, step=step, parts=tuple(parts[r] for r in range(world_size))
        )

    def start(
        self,
        workers: list[RemoteWorker],
        *,
        world_size: int | None = None,
        buddy_of: Callable[[int], RemoteWorker | None] | None = None,
        **changes: Any,
    ) -> int:
        """Send the next generation's assignments; returns its number. The first worker is rank 0. A rank for which
        `buddy_of` returns None needs no copy: a replica sends it."""
        self.generation += 1
        self._fleet.has_exit.clear()
        for rank, worker in enumerate(workers):
            values: dict[str, Any] = {
                "job_id": "job",
                "attempt": 1,
                "generation": self.generation,
                "rank": rank,
                "layout": fully_sharded(world_size or len(workers)),
                "store_host": "127.0.0.1",
                "store_port": workers[0].store_port,
                "restore_from": newest_committed(self.root) if Path(self.root).exists() else None,
                "collective_timeout_s": 600.0,
                **changes,
            }
            if buddy_of is not None:
                buddy = buddy_of(rank)
                values["buddy"] = None if buddy is None else buddy.snapshot_server
            worker.call("run", Assignment(**values))
        return self.generation

    def run(self, workers: list[RemoteWorker], **changes: Any) -> list[WorkerExit]:
        """Run a generation to its end, then commit its checkpoints."""
        self.start(workers, **changes)
        exits = [worker.exit() for worker in workers]
        self.commit(workers)
        return exits

    def finish(self, workers: list[RemoteWorker], **changes: Any) -> None:
        """Run a generation that every rank completes."""
        exits = self.run(workers, **changes)
        assert {end.kind for end in exits} == {ExitKind.FINISHED}, [end.error for end in exits]

    def interrupt(self, workers: list[RemoteWorker]) -> list[WorkerExit]:
        """Interrupt the current generation everywhere; the exits."""
        for worker in workers:
            worker.call("interrupt", self.generation)
        return [worker.exit() for worker in workers]

    def wait_for_an_exit(self) -> None:
        assert self._fleet.has_exit.wait(PATIENCE_S)

    def wait_until_committed(self, workers: list[RemoteWorker], step: int) -> None:
        """Wait for the parts of a checkpoint: they are written in the background, and their completion is not
        signalled."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(f"step-{step:012d}" in directory for directory in self.committed):
            assert time.monotonic() < deadline
            self.commit(workers)

    def commit(self, workers: list[RemoteWorker]) -> None:
        """Write the marker of every checkpoint whose parts were all reported."""
        parts = [item for worker in workers for item in worker.poll() if isinstance(item, SavedPart)]
        for directory in sorted({part.directory for part in parts} - set(self.committed)):
            own = {part.rank: part for part in parts if part.directory == directory}
            one = next(iter(own.values()))
            if len(own) == one.world_size:
                write_marker(directory, marker_of(list(own.values()), job_id="job", attempt=1, now=0.0))
                self.committed.append(directory)

    def reports(self, worker: RemoteWorker) -> list[StepReport]:
        """The worker's reports of the newest generation."""
        return [r for r in self.reported([worker], StepReport) if r.generation == self.generation]

    @staticmethod
    def losses(workers: list[RemoteWorker]) -> dict[int, float]:
        """Loss by step; a step that was done again must give what it gave before. The report of a step that was broken
        off once it was decided comes with the next group of the worker."""
        losses: dict[int, float] = {}
        for worker in workers:
            reports = worker.reports if worker.gone.is_set() else worker.poll()
            has_reported = False
            for item in reports:
                late = item.past if isinstance(item, GroupFormed) and has_reported else ()
                for report in (item,) if isinstance(item, StepReport) else late:
                    has_reported = True
                    assert report.loss is not None
                    assert losses.setdefault(report.step, report.loss) == pytest.approx(report.loss, abs=1e-5)
        return losses

    @staticmethod
    def reported(workers: list[RemoteWorker], kind: type[Any]) -> list[Any]:
        assert issubclass(kind, get_args(WorkerReport))
        return [item for worker in workers for item in worker.poll() if isinstance(item, kind)]


class Fleet:
    """Worker processes, all forked from one zygote. They end with their test."""

    def __init__(self, directory: Path, zygote: Zygote | None = None) -> None:
        """`zygote`: decides where all workers run; if None, it is that of the session."""
        self._workers: list[RemoteWorker] = []
        self.has_exit = threading.Event()
        """Set when a worker has left a generation."""
        directory.mkdir(exist_ok=True)
        self._listener = Listener(str(directory / "workers"), family="AF_UNIX")
        self._zygote = zygote or shared_zygote()

    @property
    def can_start(self) -> bool:
        """The zygote is alive."""
        return self._zygote.is_alive

    def start(
        self,
        spec: dict[str, Any],
        root: str,
        memory: tuple[str, str] | None = None,
        by_axis: bool | None = None,
    ) -> RemoteWorker:
        """OSError: the zygote has died."""
        self._zygote.start(_PROGRAM, str(self._listener.address))
        listening = self._listener._listener._socket  # type: ignore[attr-defined]
        while not select.select([listening], [], [], 1.0)[0]:
            if not self.can_start:
                raise ConnectionError("the zygote has died")
        connection = self._listener.accept()
        worker = RemoteWorker(connection, connection.recv()[1], spec, root, self.has_exit, memory, by_axis)
        self._workers.append(worker)
        return worker

    def kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def close(self) -> None:
        self.kill_all()
        self._listener.close()
