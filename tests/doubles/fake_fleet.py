"""FakeFleet: the handles of one supervisor to FakeWorkers."""

from __future__ import annotations

from dataclasses import dataclass

from doubles.fake_workers import FakeWorker, FakeWorkers
from shoal_workers.contract.messages import Assignment, ErrorReport, WorkerExit, WorkerInfo, WorkerPoll
from shoal_workers.contract.snapshots import SnapshotPart


@dataclass(frozen=True)
class Start:
    """One request to start a worker."""

    index: int
    worker_id: str
    avoid_nodes: tuple[str, ...]
    only_on: str


class FakeFleet:
    """A `protocols.Fleet`. Each worker gets a node of its own, unless `node_of` names one."""

    def __init__(self, workers: FakeWorkers, log: list[str] | None = None) -> None:
        """`log`: the name of every call that the executor makes is appended, for tests of the order."""
        self.workers = workers
        self.starts: list[Start] = []
        self.node_of: dict[int, str] = {}
        self.killed: list[int] = []
        self._handles: dict[int, FakeWorker] = {}
        self._infos: dict[int, WorkerInfo] = {}
        self._log = log if log is not None else []

    async def start(self, index: int, worker_id: str, avoid_nodes: tuple[str, ...], only_on: str) -> None:
        self._log.append("start")
        self.starts.append(Start(index, worker_id, avoid_nodes, only_on))
        node_id = only_on or self.node_of.get(index, f"node-{index}")
        self._handles[index] = self.workers.create(worker_id, node_id=node_id)

    def find(self, index: int, worker_id: str, info: WorkerInfo | None) -> bool:
        worker = self.workers.by_name.get(worker_id)
        if worker is None or not worker.is_alive:
            return False
        self._handles[index] = worker
        if info is not None:
            self._infos[index] = info
        return True

    async def prepare(self, index: int) -> WorkerInfo | ErrorReport:
        worker = self._handles[index]
        answer = await worker.call(worker.prepare())
        if isinstance(answer, WorkerInfo):
            self._infos[index] = answer
        return answer

    async def run(self, index: int, assignment: Assignment) -> WorkerExit:
        self._log.append("run")
        worker = self._handles[index]
        return await worker.call(worker.run(assignment))

    async def join(self, index: int, generation: int) -> WorkerExit:
        worker = self._handles[index]
        return await worker.call(worker.join(generation))

    async def poll(self, index: int, after: int, acknowledged: int, wait_s: float) -> WorkerPoll:
        worker = self._handles[index]
        return await worker.call(worker.poll(after, acknowledged, wait_s))

    async def snapshot_parts(self, index: int) -> tuple[SnapshotPart, ...]:
        worker = self._handles[index]

        async def answer() -> tuple[SnapshotPart, ...]:
            return worker.parts

        return await worker.call(answer())

    async def interrupt(self, index: int, generation: int) -> None:
        self._log.append("interrupt")
        worker = self._handles[index]
        await worker.call(worker.interrupt(generation))

    async def request_yield(self, index: int, generation: int, durable: bool) -> None:
        worker = self._handles[index]
        await worker.call(worker.request_yield(durable))

    async def forget_memory(self, index: int) -> None:
        self._log.append("forget_memory")
        worker = self._handles[index]
        await worker.call(worker.forget_snapshots())

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
        if worker is not None:
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

    async def died_at(self, actor_id: str) -> float | None:
        worker = self.workers.by_name.get(actor_id)
        return None if worker is None else worker.died_at
