"""Real actors of a supervisor and of its workers, whose engine only answers: no model, no torch, no process group.

The worker is the shipped actor (its threads, outbox, rendezvous store's port, measurements, fences and lives); only its
engine is another one. A group "forms" when all its ranks have got `run`, and completes a step each STEP_S seconds by
the clock of the machine, which all actors share. Each `run` leaves a note in the directory of the attempt, from which
the benchmark reads when it arrived. The cluster's nodes do not have this module: bench/scale/ray_attempt.py has it
pickled by value.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal_service.reports import SupervisorReports
from shoal_service.supervisor.actor import SupervisorActor
from shoal_workers.actor import WorkerActor
from shoal_workers.contract.messages import Assignment, ExitKind, Phase, Progress, WorkerExit
from shoal_workers.contract.model import ModelShape
from shoal_workers.contract.profiles import ProfileRequest
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.contract.worker_reports import GroupFormed, StepReport
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import Position

STEP_S = 0.5
TOTAL_STEPS = 1_000_000
FORMED = "formed"
"""File in the directory of a generation: the time at which its first step began."""
_STOP = "stop"
"""File in that directory: the step after which all ranks yield. The first rank that is asked decides."""
_RANKS_PER_MEMORY = 8
_LOOK_S = 0.02
_PART_BYTES = 1 << 30


class WorkerActorWithoutTorch(WorkerActor):
    """Its process has the title that Shoal looks for before it kills a worker: the name begins with WorkerActor."""

    def _load_engine(self) -> Any:
        if self._engine is None:
            memory = ThinMemory(self._node_id)
            engine: Any = ThinEngine(
                notes_of(self._config.checkpoint_root),
                self._config.worker_id,
                self._outbox,
                StoreServer(self._node_ip, self._config.snapshot_key),
                memory,
            )
            self._snapshot_store, self._engine = memory, engine  # type: ignore[assignment]
            engine.interrupt(self._fenced)
        return self._engine


class SupervisorActorOfThinWorkers(SupervisorActor):
    worker_class = WorkerActorWithoutTorch

    def pid(self) -> int:
        return os.getpid()

    def pull(self, after: int, wait_s: float) -> SupervisorReports:
        """Reads the outbox, since the supervisor has no home."""
        return self._supervisor.outbox.pull(after, wait_s)


def notes_of(checkpoint_root: str) -> Path:
    """The directory of an attempt's notes: one directory for each generation, in it a file for each rank."""
    return Path(f"{checkpoint_root}-notes")


class ThinMemory:
    """Stands in the place of the snapshot store: it says which parts would be there, and keeps none."""

    port = 1

    def __init__(self, node_id: str) -> None:
        self.memory_id = node_id
        self._parts: tuple[SnapshotPart, ...] = ()

    def keep(self, assignment: Assignment, step: int, first_step: int) -> None:
        """The parts of the last two steps of this generation: of the ranks that share this memory, and of those before,
        which send their copies here."""
        begin = assignment.rank // _RANKS_PER_MEMORY * _RANKS_PER_MEMORY
        ranks = {rank % assignment.world_size for rank in range(begin - _RANKS_PER_MEMORY, begin + _RANKS_PER_MEMORY)}
        self._parts = tuple(
            SnapshotPart(
                generation=assignment.generation,
                rank=shard,
                world_size=assignment.num_shards,
                step=kept,
                num_bytes=_PART_BYTES,
                node_id=self.memory_id,
            )
            for shard in sorted({assignment.layout.shard_of(rank) for rank in ranks})
            for kept in range(max(first_step + 1, step - 1), step + 1)
        )

    def snapshot_parts(self) -> tuple[SnapshotPart, ...]:
        return self._parts

    def remove_attempt(self) -> None:
        self._parts = ()


class ThinEngine:
    """Answers as `shoal_workers.engine.engine.Engine` does."""

    model_shape = None

    def __init__(self, notes: Path, worker_id: str, outbox: Outbox, store: StoreServer, memory: ThinMemory) -> None:
        self._notes = notes
        self._worker_id = worker_id
        self._outbox = outbox
        self._store = store
        self._memory = memory
        self._position = Position()
        self._changed = threading.Condition()
        self._fenced = 0
        self._yields_from = 0
        """The newest generation that was asked to yield."""

    @property
    def store_port(self) -> int:
        return self._store.port

    @property
    def progress(self) -> Progress:
        return self._position.progress()

    def signs(self) -> tuple[None, tuple[()]]:
        return None, ()

    def sample_links(self) -> None:
        """There is no link."""

    def prepare(self, expected_bytes: int = 0) -> None:
        self._position.enter(Phase.IDLE)

    def build_model(self) -> ModelShape:
        return ModelShape(tensors={})

    def note_commit(self, generation: int, step: int, error: str = "") -> None:
        """Nothing waits for it: the training never finishes."""

    def request_profile(self, generation: int, request: ProfileRequest) -> None:
        """There is nothing to profile."""

    def interrupt(self, generation: int) -> None:
        with self._changed:
            self._fenced = max(self._fenced, generation)
            self._changed.notify_all()

    def request_yield(self, generation: int, *, durable: bool = True) -> None:
        with self._changed:
            self._yields_from = generation
            self._changed.notify_all()

    def run(self, assignment: Assignment) -> WorkerExit:
        source = assignment.restore_snapshot
        first_step = source.step if source is not None else 0
        folder = self._notes / str(assignment.generation)
        self._note_arrival(folder, assignment)
        self._position.begin(assignment.generation)
        self._position.enter(Phase.FORMING)
        self._position.reach(first_step)
        if assignment.rank == 0 and not self._form(folder, assignment, first_step):
            return self._exit(assignment, ExitKind.INTERRUPTED)
        kind = self._train(folder, assignment, first_step)
        return self._exit(assignment, kind)

    def _note_arrival(self, folder: Path, assignment: Assignment) -> None:
        """Writes a file, which appears with all that is in it."""
        folder.mkdir(parents=True, exist_ok=True)
        note = {
            "at": time.time(),
            "pid": os.getpid(),
            "worker": self._worker_id,
            "node": self._memory.memory_id,
            "of": assignment.world_size,
        }
        unfinished = folder / f".{assignment.rank}"
        unfinished.write_text(json.dumps(note))
        unfinished.rename(folder / str(assignment.rank))

    def _form(self, folder: Path, assignment: Assignment, first_step: int) -> bool:
        """Rank 0 waits for all others. False: interrupted."""
        began = time.perf_counter()
        while sum(path.name.isdigit() for path in folder.iterdir()) < assignment.world_size:
            if self._waits(assignment.generation, _LOOK_S):
                return False
        at = time.time()
        (folder / FORMED).write_text(str(at))
        self._outbox.report(
            GroupFormed(
                generation=assignment.generation,
                at=at,
                start_step=first_step,
                total_steps=TOTAL_STEPS,
                form_s=time.perf_counter() - began,
                build_s=0.0,
                restore_s=0.0,
                num_parameters=1,
            )
        )
        return True

    def _train(self, folder: Path, assignment: Assignment, first_step: int) -> ExitKind:
        generation, began, step = assignment.generation, 0.0, first_step
        while True:
            is_asked = self._yields_from >= generation
            if began and is_asked and self._last_step(folder, step + 1) <= step:
                return ExitKind.YIELDED
            next_at = began + (step - first_step + 1) * STEP_S if began else time.time() + STEP_S
            if self._waits(generation, max(0.0, next_at - time.time()), is_asked=is_asked):
                return ExitKind.INTERRUPTED
            if not began:
                began = _time_in(folder / FORMED)
                if began:
                    self._position.enter(Phase.FORWARD)
            due = first_step + int((time.time() - began) / STEP_S) if began else first_step
            if due > step:
                step = due
                self._position.reach(step)
                self._memory.keep(assignment, step, first_step)
                if assignment.rank == 0:
                    self._report(assignment, step)

    def _waits(self, generation: int, seconds: float, *, is_asked: bool = True) -> bool:
        """Waits until that time, or until something is asked for. True: the generation is fenced."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._fenced >= generation or (not is_asked and self._yields_from >= generation), seconds
            )
            return self._fenced >= generation

    def _last_step(self, folder: Path, proposed: int) -> int:
        """The step after which the group stops: the same for all ranks."""
        chosen, own = folder / _STOP, folder / f".{_STOP}-{os.getpid()}"
        if not chosen.exists():
            own.write_text(str(proposed))
            with suppress(FileExistsError):
                chosen.hardlink_to(own)
        return int(chosen.read_text())

    def _report(self, assignment: Assignment, step: int) -> None:
        num = assignment.world_size
        self._outbox.report(
            StepReport(
                generation=assignment.generation,
                step=step,
                at=time.time(),
                loss=2.5,
                grad_norm=1.0,
                lr=1e-3,
                tokens=8 * num,
                step_s=STEP_S,
                world_size=num,
                compute_s=(0.9 * STEP_S,) * num,
            )
        )

    def _exit(self, assignment: Assignment, kind: ExitKind) -> WorkerExit:
        self._position.enter(Phase.IDLE)
        return WorkerExit(
            generation=assignment.generation,
            rank=assignment.rank,
            kind=kind,
            step=self._position.step,
            snapshot_parts=self._memory.snapshot_parts(),
            at=time.time(),
        )


def _time_in(path: Path) -> float:
    """The time in a file; 0: it is not there yet, or not written yet."""
    try:
        return float(path.read_text() or 0.0)
    except FileNotFoundError:
        return 0.0
