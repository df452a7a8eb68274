"""FakeFleet: the handles of one supervisor to FakeWorkers."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from doubles.fake_workers import FakeWorker, FakeWorkers
from shoal_service.core.attempt.messages import StartWorker
from shoal_workers.contract.messages import (
    Assignment,
    ErrorReport,
    MetricsBatch,
    MetricsProgress,
    WorkerExit,
    WorkerInfo,
    WorkerPoll,
    WorkerStack,
)
from shoal_workers.contract.model import ModelShape
from shoal_workers.contract.profiles import ProfileRequest
from shoal_workers.contract.snapshots import SnapshotPart

T = TypeVar("T")


class FakeFleet:
    """A `protocols.Fleet`. Each worker gets a node of its own, unless `node_of` names one."""

    def __init__(
        self,
        workers: FakeWorkers,
        log: list[str] | None = None,
        *,
        life: int = 1,
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            log: the name of every call that the executor makes is appended, for tests of the order.
            on_replaced: a worker has refused a call. The real one ends the process, so the call never returns.
        """
        self.workers = workers
        self.life = life
        self._on_replaced = on_replaced
        self.starts: list[StartWorker] = []
        self.node_of: dict[int, str] = {}
        self.killed: list[int] = []
        self._handles: dict[int, FakeWorker] = {}
        self._infos: dict[int, WorkerInfo] = {}
        self._log = log if log is not None else []

    async def start(self, order: StartWorker) -> None:
        index, worker_id = order.index, order.worker_id
        self._log.append("start")
        self.starts.append(order)
        node_id = order.only_on or self.node_of.get(index, f"node-{index}")
        known = self.workers.by_name.get(worker_id)
        is_there = known is not None and known.is_alive
        self._handles[index] = known if is_there and known else self.workers.create(worker_id, node_id=node_id)

    def find(self, index: int, worker_id: str, info: WorkerInfo | None) -> bool:
        worker = self.workers.by_name.get(worker_id)
        if worker is None or not worker.is_alive:
            return False
        self._handles[index] = worker
        if info is not None:
            self._infos[index] = info
        return True

    async def adopt(self, index: int, generation: int) -> None:
        self._log.append("adopt")
        await self._call(index, lambda worker: worker.adopt(generation))

    async def prepare(self, index: int) -> WorkerInfo | ErrorReport:
        answer = await self._call(index, lambda worker: worker.prepare())
        if isinstance(answer, WorkerInfo):
            self._infos[index] = answer
        return answer

    async def run(self, index: int, assignment: Assignment) -> WorkerExit:
        self._log.append("run")
        return await self._call(index, lambda worker: worker.run(assignment))

    async def join(self, index: int, generation: int) -> WorkerExit:
        return await self._call(index, lambda worker: worker.join(generation))

    async def poll(self, index: int, after: int, acknowledged: int, wait_s: float) -> WorkerPoll:
        return await self._call(index, lambda worker: worker.poll(after, acknowledged, wait_s))

    async def snapshot_parts(self, index: int) -> tuple[SnapshotPart, ...]:
        return await self._call(index, lambda worker: worker.held())

    async def model_shape(self, index: int) -> ModelShape | None:
        return await self._call(index, lambda worker: worker.model_shape())

    async def build_model(self, index: int) -> ModelShape | ErrorReport:
        return await self._call(index, lambda worker: worker.build_model())

    async def interrupt(self, index: int, generation: int) -> None:
        self._log.append("interrupt")
        await self._call(index, lambda worker: worker.interrupt(generation))

    async def request_yield(self, index: int, generation: int, durable: bool) -> None:
        await self._call(index, lambda worker: worker.request_yield(durable))

    async def note_commit(self, index: int, generation: int, step: int, error: str) -> None:
        await self._call(index, lambda worker: worker.note_commit(generation, step, error))

    async def request_profile(self, index: int, generation: int, request: ProfileRequest) -> None:
        await self._call(index, lambda worker: worker.request_profile(generation, request))

    async def forward_metrics(self, index: int, batch: MetricsBatch) -> MetricsProgress:
        return await self._call(index, lambda worker: worker.forward_metrics(batch))

    async def forget_snapshots(self, index: int) -> None:
        self._log.append("forget_snapshots")
        await self._call(index, lambda worker: worker.forget_snapshots())

    async def keep_files(self, index: int) -> bool | None:
        return await self._call(index, lambda worker: worker.keep_files())

    async def stack(self, index: int, *, native: bool = False) -> WorkerStack:
        return self._handles[index].stack

    async def _call(self, index: int, work: Callable[[FakeWorker], Coroutine[Any, Any, T]]) -> T:
        worker = self._handles[index]

        async def unless_refused() -> T:
            if worker.refuses(self.life):
                self._on_replaced()
                await asyncio.get_running_loop().create_future()  # the process has ended
            return await work(worker)

        return await worker.call(unless_refused())

    def knows(self, index: int) -> bool:
        return index in self._handles

    def by_node(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, info in self._infos.items():
            if index in self._handles:
                found.setdefault(info.node_id, []).append(index)
        return found

    async def kill(self, index: int) -> None:
        self._infos.pop(index, None)
        worker = self._handles.pop(index, None)
        if worker is not None and worker.refuses(self.life):
            self._on_replaced()
        elif worker is not None:
            self._log.append("kill")
            self.killed.append(index)
            worker.die()
            self.workers.by_name.pop(worker.info.worker_id, None)

    def forget(self, index: int) -> None:
        self._handles.pop(index, None)
        self._infos.pop(index, None)

    def actor_id(self, index: int) -> str | None:
        worker = self._handles.get(index)
        return None if worker is None else worker.info.worker_id

    async def exit_words(self, info: WorkerInfo) -> str | None:
        return next((worker.exit_words for worker in self.workers.created if worker.info == info), None)

    async def died_at(self, actor_id: str) -> float | None:
        worker = self.workers.by_name.get(actor_id)
        return None if worker is None else worker.died_at
