"""One rank of the benchmark of moves: the engine with a snapshot store, from one layout's generation to the next.

    copy      all ranks copy as many bytes as they have just read, at the same time, from shared memory to shared memory
    run       a generation: it is restored from the snapshot of the one before, trains some steps, and yields

Ranks begin to copy, and to read, together: a barrier is right before both.

Times are those of the system-wide clock, so that the ranks' intervals can be compared. `bench/layouts/moving.py` starts
and commands these processes.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from layouts.tensor_pages import reset_peak, status_bytes
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.messages import Assignment, ExitKind, Phase
from shoal_workers.contract.snapshots import SnapshotSource
from shoal_workers.contract.worker_reports import GroupFormed
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.snapshot_store.transfer.loading import LoadResult

STEPS = 5
"""Steps of each generation. The second has the memory of all later ones; in the fifth, peers' slots are mapped."""
COPY_BYTES = 128 << 20
"""Size of each of the two buffers that are copied again and again: all ranks' together are many times the caches."""
_LOADS = 3
"""How often each restore is repeated: the same parts into the same tensors."""
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds of the system's monotonic clock."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Passage:
    """What one rank did while all copied, or read."""

    interval: Interval
    cpu_s: float


@dataclass(frozen=True, slots=True)
class RankMove:
    """What one rank did until the end of its first step in the new layout."""

    loads: tuple[Passage, ...]
    """The same load, several times."""
    state_bytes: int
    fresh_bytes: int
    """Bytes of pages that were touched for the first time during the first load."""
    build_s: float
    """Seconds to build model and optimizer; rank 0 only."""
    change: Interval
    """The time from the assignment to the end of the first step, as long as if the state had been loaded once."""
    change_cpu_s: float
    """CPU seconds in that time, forward and backward passes included."""
    extra_bytes: int
    """Peak until the end of the first step, beyond the memory in the old layout."""
    step: int
    """The step at which the generation has yielded."""


@dataclass(frozen=True, slots=True)
class _Use:
    at_s: float
    cpu_s: float
    num_faults: int

    @staticmethod
    def now() -> _Use:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return _Use(time.perf_counter(), used.ru_utime + used.ru_stime, used.ru_minflt)

    def until(self, after: _Use) -> Passage:
        return Passage(Interval(self.at_s, after.at_s), after.cpu_s - self.cpu_s)


class _MeasuredStore(SnapshotStore):
    """Notes what each load used; all ranks begin it together."""

    barrier: Barrier
    loads: tuple[Passage, ...] = ()
    fresh_bytes = 0
    state_bytes = 0

    def load(
        self,
        state: Mapping[str, torch.Tensor],
        source: SnapshotSource,
        *,
        check: Callable[[], None],
        optional: Mapping[str, str] | None = None,
    ) -> LoadResult:
        self.state_bytes = sum(local_tensor(tensor).nbytes for tensor in state.values())
        self.loads = ()
        for _ in range(_LOADS):
            self.barrier.wait(_PATIENCE_S)
            before = _Use.now()
            loaded = super().load(state, source, check=check, optional=optional)
            after = _Use.now()
            if not self.loads:
                self.fresh_bytes = (after.num_faults - before.num_faults) * resource.getpagesize()
            self.loads += (before.until(after),)
        return loaded

    @property
    def repeated(self) -> tuple[float, float]:
        """Seconds, and CPU seconds, of all loads but the first."""
        first, last = self.loads[0], self.loads[-1]
        return last.interval.end_s - first.interval.end_s, sum(one.cpu_s for one in self.loads[1:])


def serve(connection: Connection, spec: dict[str, Any], folder: str, rank: int, barrier: Barrier) -> None:
    """Sends the ports of its rendezvous store and of its snapshot store; then answers commands until None."""
    torch.set_num_threads(1)
    moving = _Rank(spec, Path(folder), rank, barrier)
    connection.send(moving.ports)
    while (command := connection.recv()) is not None:
        connection.send(moving.copy(command) if isinstance(command, int) else moving.run(command))
    moving.close()


class _Rank:
    def __init__(self, spec: dict[str, Any], folder: Path, rank: int, barrier: Barrier) -> None:
        self._barrier = barrier
        self._source, self._target = (_shared_memory(folder / f"copy-{rank}-{number}") for number in range(2))
        self._store = _MeasuredStore(
            job_id="bench", attempt=1, worker_id=f"s{rank}", node_id="n", key="key", root=folder
        )
        self._store.barrier = barrier
        self._outbox = Outbox(f"rank-{os.getpid()}")
        self._engine = Engine(
            parse_spec(spec),
            checkpoint_root=f"{folder}/checkpoints",
            outbox=self._outbox,
            store=StoreServer("127.0.0.1", folder.name),
            snapshot_store=self._store,
            on_phase=self._enter,
        )
        self._engine.prepare()
        self._seq = 0
        self._generation = 0
        self._first_step = -1
        self._resident = 0
        self._peak = 0
        self._began = self._stepped = _Use.now()

    @property
    def ports(self) -> tuple[int, int]:
        return self._engine.store_port, self._store.port

    def copy(self, num_bytes: int) -> Passage:
        """Copies `num_bytes` bytes between two buffers in shared memory whose pages are mapped in this process."""
        self._barrier.wait(_PATIENCE_S)
        before = _Use.now()
        for start in range(0, num_bytes, COPY_BYTES):
            length = min(COPY_BYTES, num_bytes - start)
            self._target[:length].copy_(self._source[:length])
        return before.until(_Use.now())

    def run(self, assignment: Assignment) -> RankMove | int:
        """Runs a generation. Returns what the rank did; if it was not restored, the step at which it has yielded."""
        reset_peak()
        self._generation, self._first_step = assignment.generation, -1
        self._resident, self._began = _resident(), _Use.now()
        ended = self._engine.run(assignment)
        assert ended.kind is ExitKind.YIELDED, ended
        poll = self._outbox.poll(self._seq, 0.0, lambda: self._engine.progress)
        self._seq = poll.seq
        if assignment.restore_snapshot is None:
            return ended.step
        repeated_s, repeated_cpu_s = self._store.repeated
        return RankMove(
            loads=self._store.loads,
            state_bytes=self._store.state_bytes,
            fresh_bytes=self._store.fresh_bytes,
            build_s=sum(item.build_s for item in poll.reports if isinstance(item, GroupFormed)),
            change=Interval(self._began.at_s, self._stepped.at_s - repeated_s),
            change_cpu_s=self._stepped.cpu_s - self._began.cpu_s - repeated_cpu_s,
            extra_bytes=self._peak - self._resident,
            step=ended.step,
        )

    def close(self) -> None:
        self._engine.close()

    def _enter(self, phase: Phase, step: int) -> None:
        if phase is not Phase.FORWARD:
            return
        if self._first_step < 0:
            self._first_step = step
        elif step == self._first_step + 1 and self._stepped.at_s < self._began.at_s:
            self._stepped, self._peak = _Use.now(), status_bytes("VmHWM")
        if step == self._first_step + STEPS - 1:
            assert self._store.peer_maps.wait(_PATIENCE_S) and self._store.peer_maps.num_bytes
            self._engine.request_yield(self._generation, durable=False)


def _shared_memory(path: Path) -> torch.Tensor:
    """Makes shared memory whose pages are in place."""
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, COPY_BYTES)
        memory = mmap.mmap(file.fileno(), COPY_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def _resident() -> int:
    return sum(status_bytes(field) for field in ("RssAnon", "RssFile", "RssShmem"))
