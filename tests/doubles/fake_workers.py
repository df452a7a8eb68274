"""FakeWorkers: the worker actors of a cluster, which outlive the supervisor that started them. Used by FakeFleet.

A test decides what a worker reports and when it leaves. It becomes warm and obeys interrupts without the test.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shoal_service.clock import Clock
from shoal_service.supervisor.protocols import WorkerCallError, WorkerDied, WorkerUnavailable
from shoal_workers.contract.base import WIRE_VERSION
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import (
    Assignment,
    ErrorReport,
    ExitKind,
    LogLine,
    MetricsBatch,
    MetricsProgress,
    Phase,
    Progress,
    WorkerExit,
    WorkerInfo,
    WorkerPoll,
    WorkerStack,
)
from shoal_workers.contract.model import ModelShape
from shoal_workers.contract.profiles import ProfileRequest
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.contract.worker_reports import GroupFormed, SavedFile, SavedPart, StepReport, WorkerReport

T = TypeVar("T")
SHAPE = ModelShape(tensors={"weight": "float32 [2]"})
FILE_BYTES = 100


@dataclass
class FakeWorker:
    """One worker actor."""

    info: WorkerInfo
    clock: Clock
    is_stuck: bool = False
    """Its training thread does not react to interrupts."""
    holds_long_polls: bool = False
    """Polls that may wait are not answered."""
    start_error: ErrorReport | None = None
    """What `prepare` answers."""
    assignment: Assignment | None = None
    """What the `run` that it is in was given."""
    is_formed: bool = False
    """For tests: rank 0 has reported that this worker's group is up."""
    step: int = 0
    interrupts: list[int] = field(default_factory=list)
    yields: list[bool] = field(default_factory=list)
    """Requests to stop at the next step boundary; True: with a durable checkpoint."""
    life: int = 0
    """The life of the newest supervisor that has called it."""
    num_refused: int = 0
    """Calls of older supervisors."""
    commits: list[tuple[int, int, str]] = field(default_factory=list)
    """Notes about the commit of the last checkpoint that it received."""
    profiles: list[tuple[int, ProfileRequest]] = field(default_factory=list)
    """Requests to profile, with their generations."""
    batches: list[MetricsBatch] = field(default_factory=list)
    """For the metrics hook beside it."""
    hook_error: str = ""
    """The hook fails with this, and logs nothing."""
    hook_logged: int = 0
    acknowledged: int = 0
    parts: tuple[SnapshotPart, ...] = ()
    trained_shape: ModelShape | None = SHAPE
    built_shape: ModelShape | ErrorReport = SHAPE
    num_forgotten: int = 0
    """Number of requests to remove the snapshots of its node."""
    died_at: float | None = None
    exit_words: str | None = None
    """What the operating system has reported of its end."""
    progress: Progress = field(default_factory=lambda: Progress(generation=0, phase=Phase.IDLE, step=0, at=0.0))
    stack: WorkerStack = field(default_factory=lambda: WorkerStack(worker_id=""))
    """What its training thread does."""
    polls: list[float] = field(default_factory=list)
    """The requested waiting time of each poll, seconds."""
    _error: WorkerCallError | None = None
    _fenced: int = 0
    _exits: dict[int, WorkerExit] = field(default_factory=dict)
    _items: list[tuple[int, WorkerReport | LogLine]] = field(default_factory=list)
    _seq: int = 0
    _changed: list[asyncio.Future[None]] = field(default_factory=list)
    _calls: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def is_alive(self) -> bool:
        return not isinstance(self._error, WorkerDied)

    def report(self, *items: WorkerReport | LogLine) -> None:
        for item in items:
            self._seq += 1
            self._items.append((self._seq, item))
        self._wake()

    def print(self, text: str) -> None:
        self.report(LogLine(at=self.clock.time(), stream="stdout", text=text))

    def leave(self, kind: ExitKind, *, is_durable: bool = False, error: ErrorReport | None = None) -> None:
        """Return from `run`."""
        run = self.assignment
        assert run is not None, f"{self.info.worker_id} is not in run"
        self.assignment = None
        self._exits = {
            run.generation: WorkerExit(
                generation=run.generation,
                rank=run.rank,
                kind=kind,
                step=self.step,
                error=error,
                snapshot_parts=self.parts,
                is_durable=is_durable,
                at=self.clock.time(),
            )
        }
        self._wake()

    def save(self) -> None:
        """Report a durable checkpoint part of the current step."""
        run = self.assignment
        assert run is not None
        name = CheckpointName(self.step, run.attempt, run.generation)
        self.report(
            SavedPart(
                generation=run.generation,
                step=self.step,
                rank=run.rank,
                world_size=run.world_size,
                directory=f"/checkpoints/{run.job_id}/{name}",
                files=(SavedFile(name=f"shard-{run.rank:05d}.bin", bytes=FILE_BYTES, crc32=0),),
                stall_s=0.1,
                write_s=0.2,
            )
        )

    def die(self, cause: IncidentCause = IncidentCause.WORKER_DIED) -> None:
        """Every call fails, also those in flight."""
        self.died_at = self.clock.time()
        self.exit_words = "was killed by signal 9 (SIGKILL)"
        self._break(WorkerDied(f"{self.info.worker_id} was killed", cause))

    def cut_off(self) -> None:
        """Calls fail, and the worker continues."""
        self._break(WorkerUnavailable(f"{self.info.worker_id} cannot be reached"))

    def reconnect(self) -> None:
        self._error = None

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """One call as a fleet makes it: it fails when the worker dies or is cut off."""
        broken: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(work)
        self._calls.add(broken)
        try:
            if self._error is not None:
                raise self._error
            await asyncio.wait({task, broken}, return_when=asyncio.FIRST_COMPLETED)
            return broken.result() if broken.done() else task.result()
        finally:
            task.cancel()
            self._calls.discard(broken)
            if broken.done():
                broken.exception()  # retrieved, also if the call was cancelled

    def refuses(self, life: int) -> bool:
        """The caller has a successor, which has called this worker."""
        if life < self.life:
            self.num_refused += 1
            return True
        self.life = life
        return False

    async def adopt(self, generation: int) -> None:
        if self.assignment is not None and self.assignment.generation > generation:
            await self.interrupt(self.assignment.generation)

    async def prepare(self) -> WorkerInfo | ErrorReport:
        return self.start_error or self.info

    async def run(self, assignment: Assignment) -> WorkerExit:
        if assignment.generation in self._exits or self.assignment is not None:
            pass  # repeated
        elif assignment.generation <= self._fenced:
            self._exits = {assignment.generation: self._stale(assignment.generation, assignment.rank)}
        else:
            self.assignment, self.is_formed = assignment, False
        return await self.join(assignment.generation)

    async def join(self, generation: int) -> WorkerExit:
        await self._wait(lambda: any(known >= generation for known in self._exits))
        return self._exits.get(generation) or self._stale(generation, 0)

    async def poll(self, after: int, acknowledged: int, wait_s: float) -> WorkerPoll:
        self.polls.append(wait_s)
        self.acknowledged = acknowledged
        self._items = [(seq, item) for seq, item in self._items if seq > acknowledged]
        try:
            await self.clock.wait_for(
                self._wait(lambda: self._seq > after and not (wait_s and self.holds_long_polls)), wait_s
            )
        except TimeoutError:
            pass
        newer = [item for seq, item in self._items if seq > after]
        return WorkerPoll(
            worker_id=self.info.worker_id,
            seq=self._seq,
            reports=tuple(item for item in newer if not isinstance(item, LogLine)),
            logs=tuple(item for item in newer if isinstance(item, LogLine)),
            progress=self.progress,
            num_refused=self.num_refused,
        )

    async def interrupt(self, generation: int) -> None:
        self.interrupts.append(generation)
        self._fenced = max(self._fenced, generation)
        if self.assignment is not None and self.assignment.generation <= generation and not self.is_stuck:
            self.leave(ExitKind.INTERRUPTED)

    async def request_yield(self, durable: bool) -> None:
        self.yields.append(durable)

    async def model_shape(self) -> ModelShape | None:
        return self.trained_shape

    async def build_model(self) -> ModelShape | ErrorReport:
        return self.built_shape

    async def held(self) -> tuple[SnapshotPart, ...]:
        return self.parts

    async def note_commit(self, generation: int, step: int, error: str) -> None:
        self.commits.append((generation, step, error))

    async def request_profile(self, generation: int, request: ProfileRequest) -> None:
        self.profiles.append((generation, request))

    async def forward_metrics(self, batch: MetricsBatch) -> MetricsProgress:
        self.batches.append(batch)
        if batch.points and not self.hook_error:
            self.hook_logged = batch.points[-1].seq
        return MetricsProgress(logged=self.hook_logged, error=self.hook_error, has_ended=bool(batch.end))

    async def keep_files(self) -> bool:
        return True

    async def forget_snapshots(self) -> None:
        self.num_forgotten += 1
        self.parts = ()

    def _stale(self, generation: int, rank: int) -> WorkerExit:
        return WorkerExit(generation=generation, rank=rank, kind=ExitKind.STALE, step=0)

    def _break(self, error: WorkerCallError) -> None:
        self._error = error
        for call in self._calls:
            if not call.done():
                call.set_exception(error)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._changed.append(changed)
            await changed

    def _wake(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)


class FakeWorkers:
    """All worker actors of the cluster, by name; and what the group of one job does."""

    def __init__(self, clock: Clock, *, total_steps: int = 4) -> None:
        self.clock = clock
        self.total_steps = total_steps
        self.by_name: dict[str, FakeWorker] = {}
        self.created: list[FakeWorker] = []
        self.start_error: ErrorReport | None = None
        """Why every worker fails to start that is created from now on."""

    def create(self, name: str, *, node_id: str) -> FakeWorker:
        number = len(self.by_name)
        info = WorkerInfo(
            version=WIRE_VERSION,
            worker_id=name,
            node_id=node_id,
            node_ip="10.0.0.1",
            pid=4000 + number,
            store_port=5000 + number,
            device="cpu",
            snapshot_port=7000 + number,
        )
        worker = FakeWorker(info, self.clock, start_error=self.start_error)
        self.by_name[name] = worker
        self.created.append(worker)
        return worker

    @property
    def group(self) -> list[FakeWorker]:
        """The workers in `run` of the newest generation, by rank."""
        running = [w for w in self.by_name.values() if w.is_alive and w.assignment is not None]
        newest = max((w.assignment.generation for w in running if w.assignment), default=0)
        of_newest = [w for w in running if w.assignment and w.assignment.generation == newest]
        return sorted(of_newest, key=lambda w: w.assignment.rank if w.assignment else 0)

    def form(self, start_step: int = 0) -> None:
        """Rank 0 reports that the group is up."""
        for worker in self.group:
            worker.step = start_step
        first = self.group[0]
        assert first.assignment is not None
        first.report(
            GroupFormed(
                generation=first.assignment.generation,
                at=self.clock.time(),
                start_step=start_step,
                total_steps=self.total_steps,
                form_s=0.1,
                build_s=0.1,
                restore_s=0.1,
                num_parameters=10,
            )
        )

    def train(self, num_steps: int = 1) -> None:
        """Rank 0 reports this number of completed steps."""
        for _ in range(num_steps):
            for worker in self.group:
                worker.step += 1
            first = self.group[0]
            assert first.assignment is not None
            first.report(
                StepReport(
                    generation=first.assignment.generation,
                    step=first.step,
                    at=self.clock.time(),
                    loss=2.5,
                    grad_norm=1.0,
                    lr=1e-3,
                    tokens=8,
                    step_s=0.5,
                    world_size=first.assignment.world_size,
                )
            )

    def finish(self) -> None:
        """Every rank saves its part of the last step and leaves."""
        for worker in self.group:
            worker.save()
        for worker in self.group:
            worker.leave(ExitKind.FINISHED, is_durable=True)
